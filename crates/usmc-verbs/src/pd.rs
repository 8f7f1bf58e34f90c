//! Protection domains: a queue pair reaches memory of its own domain only.

use std::rc::Rc;

use crate::device::Device;
use crate::error::Error;
use crate::sys::*;

/// A protection domain. Copies are the same domain.
///
/// Each link has one of its own, so that a peer's guesses of keys end at its link (smcr.md, 1.2).
#[derive(Clone)]
pub struct Pd {
    pub(crate) inner: Rc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) device: Device,
    pub(crate) raw: *mut ibv_pd,
}

impl Pd {
    /// A new domain.
    ///
    /// # Errors
    ///
    /// [`Error::Call`].
    pub fn new(device: &Device) -> Result<Pd, Error> {
        // SAFETY: The context is open.
        let raw = unsafe { (device.functions().ibv_alloc_pd)(device.inner.context) };
        if raw.is_null() {
            return Err(Error::last("ibv_alloc_pd"));
        }
        Ok(Pd { inner: Rc::new(Inner { device: device.clone(), raw }) })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: Memory and queue pairs of the domain held this and are gone.
        let _ = unsafe { (self.device.functions().ibv_dealloc_pd)(self.raw) };
    }
}
