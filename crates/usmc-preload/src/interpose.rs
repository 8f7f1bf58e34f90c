//! The ways a symbol is exported. Each macro takes lines of `symbols.rs`.

/// `name(args) -> ret = api_function;` exports `name` with libc's signature.
///
/// `: function` behind it proves the signature against the `libc` crate's declaration of that function.
/// Arguments behind a `;` are those of a variadic function, taken as integers.
macro_rules! interpose {
    ($($name:ident($($arg:ident: $ty:ty),* $(; $($rest:ident: $rest_ty:ty),*)?) $(-> $ret:ty)?
        = $api:ident $(: $proof:ident)?;)*) => { $(
        $crate::interpose::prove!([$($proof)?] ($($ty),*) $(variadic $([$rest_ty])*)? ($(-> $ret)?));
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, reason = "libc's name")]
        unsafe extern "C" fn $name($($arg: $ty),* $(, $($rest: $rest_ty),*)?) $(-> $ret)? {
            // SAFETY: the application calls with the arguments libc's function demands.
            unsafe { usmc::api::$api($($arg),* $(, $($rest),*)?) }
        }
    )* };
}

/// With a name: the signature is that of `libc`'s declaration, or this does not compile.
macro_rules! prove {
    ([] $($any:tt)*) => {};
    ([$name:ident] ($($ty:ty),*) ($($ret:tt)*)) => {
        const _: unsafe extern "C" fn($($ty),*) $($ret)* = libc::$name;
    };
    ([$name:ident] ($($ty:ty),*) variadic $([$rest:ty])* ($($ret:tt)*)) => {
        const _: unsafe extern "C" fn($($ty),*, ...) $($ret)* = libc::$name;
    };
}

/// `__name_chk(args) -> ret = name(args) if condition;`: what `-D_FORTIFY_SOURCE` compiles calls into. Where
/// the condition fails libc's own function is called, which ends the program in its own way.
macro_rules! fortified {
    ($($name:ident($($arg:ident: $ty:ty),*) -> $ret:ty = $api:ident($($given:expr),*) if $fits:expr;)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $ty),*) -> $ret {
            if !$fits {
                // SAFETY: the caller's arguments; does not return.
                return unsafe { usmc::real::$name($($arg),*) };
            }
            // SAFETY: the application calls with the arguments libc's function demands.
            unsafe { usmc::api::$api($($given),*) }
        }
    )* };
}

pub(crate) use {fortified, interpose, prove};
