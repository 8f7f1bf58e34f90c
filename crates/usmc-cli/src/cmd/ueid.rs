//! `usmc ueid`: user-defined enterprise IDs, as smcd-ueid(8) has them.

use std::ffi::c_int;
use std::io::{self, Write};

use anyhow::{Context, Result, bail};
use clap::Subcommand;
use smc_proto::ids::Eid;
use toml_edit::{Array, DocumentMut, Item, value};

use crate::config::edit::{self, Edit};
use crate::config::{self, Config, ConfigArgs};
use crate::table;

/// Show and change user-defined enterprise IDs (UEIDs)
///
/// Two hosts use version 2 of SMC with each other if they have an EID in common. At most four UEIDs are kept, in the
/// configuration file.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(subcommand)]
    action: Option<Action>,
    #[command(flatten)]
    target: edit::Target,
    /// Print a JSON array of strings
    #[arg(long)]
    json: bool,
}

#[derive(Subcommand, Debug)]
enum Action {
    /// Show all UEIDs
    Show {
        /// Print a JSON array of strings
        #[arg(long)]
        json: bool,
    },
    /// Add a UEID
    Add {
        /// Up to 32 of A-Z, 0-9, - and . ; small letters become capital ones
        #[arg(value_parser = config::eid)]
        ueid: String,
    },
    /// Delete a UEID
    Del {
        /// Which one
        ueid: String,
    },
    /// Delete all UEIDs
    Flush,
}

/// Shows or changes the list.
///
/// # Errors
/// A configuration that is refused, a UEID more than there may be, one that is not there.
pub fn run(args: &Args) -> Result<c_int> {
    let config = args.target.config();
    match &args.action {
        None => show(&config, args.json),
        Some(Action::Show { json }) => show(&config, *json || args.json),
        Some(Action::Add { ueid }) => add(&config, ueid),
        Some(Action::Del { ueid }) => delete(&config, ueid),
        Some(Action::Flush) => change(&config, |ueids| {
            ueids.clear();
            Ok(())
        }),
    }
}

fn show(config: &ConfigArgs, json: bool) -> Result<c_int> {
    let config = Config::load(config)?;
    let ueids: Vec<&str> = config.ueids().collect();
    let mut out = io::stdout().lock();
    let printed = if json {
        table::json(&mut out, &ueids)
    } else {
        ueids.iter().try_for_each(|ueid| writeln!(out, "{ueid}"))
    };
    printed.context("cannot write the list")?;
    if ueids.is_empty() && !json {
        eprintln!(
            "usmc: there is no UEID; usmc ueid add makes one, which hosts with an agent have to have in common"
        );
    }
    Ok(0)
}

fn add(config: &ConfigArgs, ueid: &str) -> Result<c_int> {
    change(config, |ueids| {
        if ueids.iter().any(|known| known == ueid) {
            bail!("the UEID {ueid} is defined already");
        }
        if ueids.len() >= Eid::MAX_CONFIGURED {
            bail!("there are {} UEIDs, which is the most; delete one first", ueids.len());
        }
        ueids.push(ueid.to_owned());
        Ok(())
    })
}

fn delete(config: &ConfigArgs, ueid: &str) -> Result<c_int> {
    let is_it = |known: &String| known.eq_ignore_ascii_case(ueid.trim_end());
    change(config, |ueids| {
        let Some(at) = ueids.iter().position(is_it) else {
            bail!("the UEID {ueid} is not defined")
        };
        ueids.remove(at);
        Ok(())
    })
}

/// The list as the files say it, changed and written to the file that is ours to change.
fn change(
    config: &ConfigArgs,
    change: impl FnOnce(&mut Vec<String>) -> Result<()>,
) -> Result<c_int> {
    let mut edit = Edit::begin(&edit::target(config)?)?;
    let files = Config::load_files(config)?;
    let mut ueids: Vec<String> = files.ueids().map(str::to_owned).collect();
    change(&mut ueids)?;
    set(&mut edit.document, &ueids);
    if ueids.is_empty() && files.text("seid") == Some("off") {
        // As in the kernel: without a UEID there would be none at all.
        edit.document["seid"] = value(true);
        eprintln!("usmc: the SEID is enabled again, since the last UEID is deleted");
    }
    edit.save()?;
    edit::warn_of_environment("USMC_UEIDS");
    Ok(0)
}

/// Replaces the list; what stands beside it in the file stays.
fn set(document: &mut DocumentMut, ueids: &[String]) {
    match document.get_mut("ueids").and_then(Item::as_array_mut) {
        Some(array) => {
            array.retain(|item| {
                item.as_str()
                    .is_some_and(|s| ueids.iter().any(|u| u.eq_ignore_ascii_case(s.trim_end())))
            });
            for ueid in ueids {
                let is_it = |text: &str| text.trim_end().eq_ignore_ascii_case(ueid);
                if !array.iter().any(|item| item.as_str().is_some_and(is_it)) {
                    array.push(ueid);
                }
            }
        }
        None => document["ueids"] = value(ueids.iter().collect::<Array>()),
    }
}
