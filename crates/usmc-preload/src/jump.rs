//! A function that must return to its caller without a frame of ours: the library hears of the call, then libc's
//! function is jumped to with every register and the stack as the caller left them.

/// Calls `{hook}` and jumps to the address it returns, all argument registers restored; al holds the count of
/// vector arguments of a variadic call. 200 bytes and the return address keep the stack aligned to 16.
#[cfg(target_arch = "x86_64")]
macro_rules! hook_then_jump {
    () => {
        "sub rsp, 200
         mov [rsp], rdi
         mov [rsp + 8], rsi
         mov [rsp + 16], rdx
         mov [rsp + 24], rcx
         mov [rsp + 32], r8
         mov [rsp + 40], r9
         mov [rsp + 48], rax
         movaps [rsp + 64], xmm0
         movaps [rsp + 80], xmm1
         movaps [rsp + 96], xmm2
         movaps [rsp + 112], xmm3
         movaps [rsp + 128], xmm4
         movaps [rsp + 144], xmm5
         movaps [rsp + 160], xmm6
         movaps [rsp + 176], xmm7
         call {hook}
         mov r11, rax
         mov rdi, [rsp]
         mov rsi, [rsp + 8]
         mov rdx, [rsp + 16]
         mov rcx, [rsp + 24]
         mov r8, [rsp + 32]
         mov r9, [rsp + 40]
         mov rax, [rsp + 48]
         movaps xmm0, [rsp + 64]
         movaps xmm1, [rsp + 80]
         movaps xmm2, [rsp + 96]
         movaps xmm3, [rsp + 112]
         movaps xmm4, [rsp + 128]
         movaps xmm5, [rsp + 144]
         movaps xmm6, [rsp + 160]
         movaps xmm7, [rsp + 176]
         add rsp, 200
         jmp r11"
    };
}

/// Calls `{hook}` with the first three arguments and jumps to the address it returns: arguments lie on the stack, and
/// eax carries none. 28 bytes and the return address keep the stack aligned to 16.
#[cfg(target_arch = "x86")]
macro_rules! hook_then_jump {
    () => {
        "sub esp, 28
         mov eax, [esp + 32]
         mov [esp], eax
         mov eax, [esp + 36]
         mov [esp + 4], eax
         mov eax, [esp + 40]
         mov [esp + 8], eax
         call {hook}
         add esp, 28
         jmp eax"
    };
}

pub(crate) use hook_then_jump;
