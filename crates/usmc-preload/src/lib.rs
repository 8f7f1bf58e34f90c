//! usmc-preload
