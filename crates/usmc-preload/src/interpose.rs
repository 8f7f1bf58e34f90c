//! The two ways a symbol is exported.

/// `name(args) -> ret = api_function;` exports `name` with libc's signature; `: libc` proves it against
/// the `libc` crate's declaration.
macro_rules! interpose {
    ($($name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)? = $api:ident $(: $proof:ident)?;)*) => { $(
        $crate::interpose::prove!([$($proof)?] unsafe extern "C" fn($($ty),*) $(-> $ret)?);
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $ty),*) $(-> $ret)? {
            // SAFETY: the application calls with the arguments libc's function demands.
            unsafe { usmc::api::$api($($arg),*) }
        }
    )* };
}

/// With a name: the signature is that of `libc`'s declaration, or this does not compile.
macro_rules! prove {
    ([] $signature:ty) => {};
    ([$name:ident] $signature:ty) => {
        const _: $signature = libc::$name;
    };
}

pub(crate) use {interpose, prove};
