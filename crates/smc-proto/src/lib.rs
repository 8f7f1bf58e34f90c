//! smc-proto
