//! Functions with arguments without number: the arguments become a `va_list`, and the function of that name
//! that takes one is called. Rust cannot write such functions, so these few lines are assembly.

/// `name(first, …, ...) = function;` exports `name`, which calls `function(first, …, va_list)`: at most five
/// arguments have names, all of them integers or pointers.
///
/// The frame, from the bottom: the six integer and eight vector registers in the order in which a `va_list`
/// wants them (System V ABI, x86-64, 3.5.7), then the `va_list`. With the return address 224 bytes.
#[cfg(target_arch = "x86_64")]
macro_rules! variadic {
    ($($name:ident($first:ident: $fty:ty $(, $arg:ident: $ty:ty)*; ...) -> $ret:ty = $function:ident;)*) => { $(
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            unsafe extern "C" fn with_list($first: $fty, $($arg: $ty,)* list: *mut core::ffi::c_void) -> $ret {
                // SAFETY: the application calls with the arguments libc's function demands.
                unsafe { usmc::api::$function($first, $($arg,)* list) }
            }
            core::arch::naked_asm!(
                "sub rsp, 216
                 mov [rsp], rdi
                 mov [rsp + 8], rsi
                 mov [rsp + 16], rdx
                 mov [rsp + 24], rcx
                 mov [rsp + 32], r8
                 mov [rsp + 40], r9
                 movaps [rsp + 48], xmm0
                 movaps [rsp + 64], xmm1
                 movaps [rsp + 80], xmm2
                 movaps [rsp + 96], xmm3
                 movaps [rsp + 112], xmm4
                 movaps [rsp + 128], xmm5
                 movaps [rsp + 144], xmm6
                 movaps [rsp + 160], xmm7
                 mov dword ptr [rsp + 176], {named}
                 mov dword ptr [rsp + 180], 48
                 lea rax, [rsp + 224]
                 mov [rsp + 184], rax
                 mov [rsp + 192], rsp",
                concat!("lea ", $crate::variadic::next_register!($($arg)*), ", [rsp + 176]"),
                "call {with_list}
                 add rsp, 216
                 ret",
                named = const 8 $(+ $crate::variadic::word!($arg))*,
                with_list = sym with_list,
            )
        }
    )* };
}

/// The same where all arguments lie on the stack: the `va_list` is the address of the first one without a name
/// (System V ABI, i386). At most six arguments have names, each of one word.
///
/// The frame is the arguments of `function`, which are copies; with the return address 32 bytes.
#[cfg(target_arch = "x86")]
macro_rules! variadic {
    ($($name:ident($($arg:ident: $ty:ty),*; ...) -> $ret:ty = $function:ident;)*) => { $(
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            unsafe extern "C" fn with_list($($arg: $ty,)* list: *mut core::ffi::c_void) -> $ret {
                // SAFETY: the application calls with the arguments libc's function demands.
                unsafe { usmc::api::$function($($arg,)* list) }
            }
            const NAMED: usize = 0 $(+ $crate::variadic::word!($arg))*;
            core::arch::naked_asm!(
                ".if {named} > 24
                 .error \"too many named arguments\"
                 .endif
                 sub esp, 28
                 lea eax, [esp + 32 + {named}]
                 mov [esp + {named}], eax
                 .set usmc_at, 0
                 .rept {named} / 4
                 mov eax, [esp + 32 + usmc_at]
                 mov [esp + usmc_at], eax
                 .set usmc_at, usmc_at + 4
                 .endr
                 call {with_list}
                 add esp, 28
                 ret",
                named = const NAMED,
                with_list = sym with_list,
            )
        }
    )* };
}

/// The register of the argument behind the first one and these.
#[cfg(target_arch = "x86_64")]
macro_rules! next_register {
    () => {
        "rsi"
    };
    ($a:ident) => {
        "rdx"
    };
    ($a:ident $b:ident) => {
        "rcx"
    };
}

/// Bytes of an argument.
macro_rules! word {
    ($arg:ident) => {
        size_of::<usize>()
    };
}

#[cfg(target_arch = "x86_64")]
pub(crate) use next_register;
pub(crate) use {variadic, word};
