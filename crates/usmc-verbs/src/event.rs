//! What a device tells unasked: ports that come and go, queue pairs that fail.

use std::mem::MaybeUninit;

use crate::cq::is_nothing;
use crate::device::Device;
use crate::error::Error;
use crate::sys::*;

/// An asynchronous event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// The port carries data.
    PortActive {
        /// From 1 on.
        port: u8,
    },
    /// The port does not. A request that is posted now may end its queue pair: hold it until [`Event::PortActive`] (m0.md, section 5).
    PortError {
        /// From 1 on.
        port: u8,
    },
    /// The port's addresses are others.
    GidChange {
        /// From 1 on.
        port: u8,
    },
    /// A queue pair has failed, and can tell so in no completion.
    QpFatal {
        /// Its number.
        qp_num: u32,
    },
    /// The peer of a queue pair asked for what it may not have.
    QpRequestError {
        /// Its number.
        qp_num: u32,
    },
    /// The peer of a queue pair reached for memory that it may not have.
    QpAccessError {
        /// Its number.
        qp_num: u32,
    },
    /// A message has come for a queue pair that was ready to receive only.
    QpEstablished {
        /// Its number.
        qp_num: u32,
    },
    /// A completion queue has run over.
    CqError {
        /// The queue's token.
        token: u64,
    },
    /// The device has failed.
    DeviceFatal,
    /// Another one, by its number in `ibv_event_type`.
    Other {
        /// The number.
        kind: u32,
    },
}

impl Device {
    /// Takes an event and acknowledges it. `None`: there is none now.
    ///
    /// # Errors
    ///
    /// [`Error::Call`]; EIO most likely means that the device has been removed.
    pub fn next_event(&self) -> Result<Option<Event>, Error> {
        let functions = self.functions();
        let mut raw = MaybeUninit::<ibv_async_event>::zeroed();
        // SAFETY: The context is open; a success fills the structure, and zeroes are a value of it.
        let returned =
            unsafe { (functions.ibv_get_async_event)(self.inner.context, raw.as_mut_ptr()) };
        if returned != 0 {
            let error = Error::last("ibv_get_async_event");
            return if is_nothing(&error) { Ok(None) } else { Err(error) };
        }
        // SAFETY: Initialized, see above.
        let mut raw = unsafe { raw.assume_init() };
        // SAFETY: As the library filled it.
        let event = unsafe { event(&raw) };
        // SAFETY: Each event is acknowledged once. Destroying its queue pair would wait for that.
        unsafe { (functions.ibv_ack_async_event)(&raw mut raw) };
        Ok(Some(event))
    }
}

/// # Safety
///
/// The event is the library's, and what it points to is there: destroying a queue removes its events, and all of it has one thread.
unsafe fn event(raw: &ibv_async_event) -> Event {
    // SAFETY: The type says which member of the union was written, and all bytes of it are initialized.
    let port = || unsafe { raw.element.port_num } as u8;
    // SAFETY: As above, and the queue pair is there.
    let qp_num = || unsafe { (*raw.element.qp).qp_num };
    // SAFETY: As above, and the completion queue is there.
    let token = || unsafe { (*raw.element.cq).cq_context } as u64;
    match raw.event_type {
        IBV_EVENT_PORT_ACTIVE => Event::PortActive { port: port() },
        IBV_EVENT_PORT_ERR => Event::PortError { port: port() },
        IBV_EVENT_GID_CHANGE => Event::GidChange { port: port() },
        IBV_EVENT_QP_FATAL => Event::QpFatal { qp_num: qp_num() },
        IBV_EVENT_QP_REQ_ERR => Event::QpRequestError { qp_num: qp_num() },
        IBV_EVENT_QP_ACCESS_ERR => Event::QpAccessError { qp_num: qp_num() },
        IBV_EVENT_COMM_EST => Event::QpEstablished { qp_num: qp_num() },
        IBV_EVENT_CQ_ERR => Event::CqError { token: token() },
        IBV_EVENT_DEVICE_FATAL => Event::DeviceFatal,
        kind => Event::Other { kind },
    }
}
