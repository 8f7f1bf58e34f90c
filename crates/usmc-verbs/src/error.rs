//! What goes wrong, and what to do about it.

use std::ffi::c_int;
use std::fmt;
use std::io;

/// Why something could not be had. The text says what to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Error {
    /// The dynamic linker did not open the library; its own words.
    NoLibrary {
        /// What dlerror(3) says.
        reason: String,
    },
    /// The library lacks a function that is needed.
    NoFunction {
        /// Its name.
        name: &'static str,
    },
    /// No device of that name is there.
    NoDevice {
        /// The name that was asked for.
        name: String,
        /// The names of those that are there.
        present: Vec<String>,
    },
    /// A value that no device could take.
    Invalid {
        /// What is wrong with it.
        what: &'static str,
    },
    /// A call failed.
    Call {
        /// The function of libibverbs.
        name: &'static str,
        /// What errno(3) says.
        errno: c_int,
    },
}

impl Error {
    /// The error number of the call that failed; `None` where no call was made.
    pub fn errno(&self) -> Option<c_int> {
        match self {
            Error::Call { errno, .. } => Some(*errno),
            _ => None,
        }
    }

    /// The error of a function that has just returned null or −1.
    pub(crate) fn last(name: &'static str) -> Error {
        let errno = io::Error::last_os_error().raw_os_error().unwrap_or(0);
        Error::Call { name, errno }
    }

    /// What a function returned: 0, an error number, its negative, or −1 and `errno`. Drivers differ.
    pub(crate) fn check(name: &'static str, returned: c_int) -> Result<(), Error> {
        match returned {
            0 => Ok(()),
            -1 => Err(Error::last(name)),
            other => Err(Error::Call { name, errno: other.saturating_abs() }),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::NoLibrary { reason } => {
                write!(
                    f,
                    "RDMA is off: install libibverbs1 and the driver's package, ibverbs-providers ({reason})"
                )
            }
            Error::NoFunction { name } => {
                write!(
                    f,
                    "RDMA is off: libibverbs.so.1 has no {name}; install libibverbs1 of rdma-core 15 or newer"
                )
            }
            Error::NoDevice { name, present } if present.is_empty() => {
                write!(
                    f,
                    "no RDMA device {name}: none is here; load the card's driver, or see `rdma link`"
                )
            }
            Error::NoDevice { name, present } => {
                write!(f, "no RDMA device {name}: name one of {}", present.join(", "))
            }
            Error::Invalid { what } => f.write_str(what),
            Error::Call { name, errno } => {
                write!(f, "{name}: {}", io::Error::from_raw_os_error(*errno))?;
                remedy(name, *errno).map_or(Ok(()), |remedy| write!(f, "; {remedy}"))
            }
        }
    }
}

impl std::error::Error for Error {}

fn remedy(name: &str, errno: c_int) -> Option<&'static str> {
    match (name, errno) {
        ("ibv_get_device_list", libc::ENOSYS) => Some("load ib_uverbs: `modprobe ib_uverbs`"),
        ("ibv_open_device", libc::EACCES | libc::EPERM) => {
            Some("give this user read and write access to /dev/infiniband/uverbs*")
        }
        ("ibv_reg_mr", libc::ENOMEM) => {
            Some("raise RLIMIT_MEMLOCK; a systemd unit has LimitMEMLOCK=infinity")
        }
        ("ibv_modify_qp", libc::ETIMEDOUT | libc::EHOSTUNREACH) => Some(
            "the peer's address has no neighbour entry: see that it answers on this network device",
        ),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returned_numbers_of_all_kinds_become_an_errno() {
        assert_eq!(Error::check("f", 0), Ok(()));
        assert_eq!(Error::check("f", 22).unwrap_err().errno(), Some(22));
        assert_eq!(Error::check("f", -22).unwrap_err().errno(), Some(22));
    }

    #[test]
    fn messages_say_what_to_do() {
        let error = Error::Call { name: "ibv_reg_mr", errno: libc::ENOMEM };
        assert!(error.to_string().contains("LimitMEMLOCK"), "{error}");
        let error = Error::NoLibrary { reason: "no such file".into() };
        assert!(error.to_string().starts_with("RDMA is off: install libibverbs1"), "{error}");
    }
}
