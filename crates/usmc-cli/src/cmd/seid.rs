//! `usmc seid`: whether the system's own enterprise ID may be used, as smcd-seid(8) has it.

use std::ffi::c_int;
use std::io::{self, Write};

use anyhow::{Context, Result, bail};
use clap::Subcommand;
use toml_edit::value;

use crate::config::edit::{self, Edit};
use crate::config::{Config, ConfigArgs};
use crate::table;

/// Show, enable or disable the system's own enterprise ID (SEID)
///
/// Only IBM Z has one. While it is disabled there must be a UEID.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(subcommand)]
    action: Option<Action>,
    #[command(flatten)]
    target: edit::Target,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Subcommand, Debug)]
enum Action {
    /// Show the SEID
    Show {
        /// Print a JSON object
        #[arg(long)]
        json: bool,
    },
    /// Enable the SEID
    Enable,
    /// Disable the SEID
    Disable,
}

/// Shows or changes it.
///
/// # Errors
/// A configuration that is refused; a disabled SEID without a UEID.
pub fn run(args: &Args) -> Result<c_int> {
    let config = args.target.config();
    let enable = match &args.action {
        None => return show(&config, args.json),
        Some(Action::Show { json }) => return show(&config, *json || args.json),
        Some(Action::Enable) => true,
        Some(Action::Disable) => false,
    };
    let mut edit = Edit::begin(&edit::target(&config)?)?;
    if !enable && Config::load_files(&config)?.ueids().next().is_none() {
        bail!("without a UEID the SEID stays enabled; add one by usmc ueid add");
    }
    edit.document["seid"] = value(enable);
    edit.save()?;
    edit::warn_of_environment("USMC_SEID");
    Ok(0)
}

fn show(config: &ConfigArgs, json: bool) -> Result<c_int> {
    let enabled = Config::load(config)?.text("seid") != Some("off");
    let mut out = io::stdout().lock();
    let printed = if json {
        // No device here has one.
        table::json(&mut out, &serde_json::json!({ "seid": null, "enabled": enabled }))
    } else {
        writeln!(out, "n/a [{}]", if enabled { "enabled" } else { "disabled" })
    };
    printed.context("cannot write the SEID")?;
    Ok(0)
}
