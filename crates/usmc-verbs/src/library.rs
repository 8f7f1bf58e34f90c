//! The library: opened by dlopen(3), for the life of the process.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::error::Error;
use crate::sys::*;

/// The library's functions. Copies are cheap.
#[derive(Clone, Copy)]
pub struct Library {
    pub(crate) functions: &'static Functions,
}

/// A structure of function pointers under the functions' own names, and how to fill it.
macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// Those that every libibverbs.so.1 has, and one that came with rdma-core 32.
        pub(crate) struct Functions {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            pub(crate) query_gid_table: Option<QueryGidTable>,
        }

        impl Functions {
            /// # Safety
            ///
            /// `handle` is libibverbs.so.1, or a library with its binary interface.
            unsafe fn find(handle: *mut c_void) -> Result<Functions, Error> {
                Ok(Functions {
                    $($name: {
                        let name = concat!(stringify!($name), "\0");
                        let found = symbol(handle, name).ok_or(Error::NoFunction { name: stringify!($name) })?;
                        // SAFETY: By the caller's word the symbol is the function of that name, whose signature this is.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?>(found) }
                    },)*
                    query_gid_table: symbol(handle, "_ibv_query_gid_table\0").map(|found| {
                        // SAFETY: As above.
                        unsafe { std::mem::transmute::<*mut c_void, QueryGidTable>(found) }
                    }),
                })
            }
        }
    };
}

type QueryGidTable =
    unsafe extern "C" fn(*mut ibv_context, *mut ibv_gid_entry, usize, u32, usize) -> isize;

functions! {
    ibv_get_device_list: fn(*mut c_int) -> *mut *mut ibv_device;
    ibv_free_device_list: fn(*mut *mut ibv_device);
    ibv_get_device_name: fn(*mut ibv_device) -> *const c_char;
    ibv_open_device: fn(*mut ibv_device) -> *mut ibv_context;
    ibv_close_device: fn(*mut ibv_context) -> c_int;
    ibv_query_device: fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
    ibv_query_port: fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
    ibv_get_async_event: fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
    ibv_ack_async_event: fn(*mut ibv_async_event);
    ibv_alloc_pd: fn(*mut ibv_context) -> *mut ibv_pd;
    ibv_dealloc_pd: fn(*mut ibv_pd) -> c_int;
    ibv_reg_mr: fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    ibv_dereg_mr: fn(*mut ibv_mr) -> c_int;
    ibv_create_comp_channel: fn(*mut ibv_context) -> *mut ibv_comp_channel;
    ibv_destroy_comp_channel: fn(*mut ibv_comp_channel) -> c_int;
    ibv_create_cq: fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    ibv_destroy_cq: fn(*mut ibv_cq) -> c_int;
    ibv_get_cq_event: fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
    ibv_ack_cq_events: fn(*mut ibv_cq, c_uint);
    ibv_create_qp: fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    ibv_modify_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    ibv_query_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int;
    ibv_destroy_qp: fn(*mut ibv_qp) -> c_int;
}

impl Library {
    /// Opens libibverbs.so.1 where the dynamic linker finds it, `LD_LIBRARY_PATH` first.
    ///
    /// The library stays loaded, as drivers do not bear to be unloaded.
    ///
    /// # Errors
    ///
    /// [`Error::NoLibrary`] and [`Error::NoFunction`]: RDMA is off.
    pub fn open() -> Result<Library, Error> {
        Library::open_name(LIBRARY)
    }

    /// Opens the library in that file.
    ///
    /// # Safety
    ///
    /// The file has libibverbs' binary interface.
    ///
    /// # Errors
    ///
    /// As [`Library::open`]; [`Error::Invalid`] for a path with a NUL.
    pub unsafe fn open_file(path: &Path) -> Result<Library, Error> {
        let name = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| Error::Invalid { what: "a path has no NUL: name another library" })?;
        Library::open_name(&name)
    }

    fn open_name(name: &CStr) -> Result<Library, Error> {
        // SAFETY: The name ends in NUL. The library's constructors only read files.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(Error::NoLibrary { reason: linker_error() });
        }
        // SAFETY: The name is that of libibverbs' binary interface, or the caller of `open_file` has vouched for the file.
        let functions = unsafe { Functions::find(handle)? };
        // A few hundred bytes for each call; the library stays as long.
        Ok(Library { functions: Box::leak(Box::new(functions)) })
    }
}

/// The symbol's newest version, which is what dlsym(3) finds in a library that has several.
fn symbol(handle: *mut c_void, name: &'static str) -> Option<*mut c_void> {
    debug_assert!(name.ends_with('\0'));
    // SAFETY: The handle is open and the name ends in NUL.
    let found = unsafe { libc::dlsym(handle, name.as_ptr().cast()) };
    (!found.is_null()).then_some(found)
}

fn linker_error() -> String {
    // SAFETY: No arguments. The text is this thread's until its next call of the linker.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "the dynamic linker gives no reason".into();
    }
    // SAFETY: A string of the linker's, see above.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open_file(path: &str) -> Error {
        // SAFETY: None of these files is opened far enough for a function of it to be called.
        unsafe { Library::open_file(Path::new(path)) }.err().expect("it is no libibverbs")
    }

    #[test]
    fn an_absent_library_says_what_to_install() {
        let text = open_file("/nonexistent/libibverbs.so.1").to_string();
        assert!(text.starts_with("RDMA is off: install libibverbs1"), "{text}");
        assert!(text.contains("/nonexistent/libibverbs.so.1"), "{text}");
    }

    #[test]
    fn a_library_without_the_functions_is_refused() {
        let error = open_file("libc.so.6");
        assert_eq!(error, Error::NoFunction { name: "ibv_get_device_list" });
    }
}
