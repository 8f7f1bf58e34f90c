//! What a panic does: one line on standard error, then abort. None unwinds into a C frame.

use core::fmt::Write;
use core::panic::PanicInfo;

struct Line {
    bytes: [u8; 256],
    len: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        // What is too long is cut; the last byte is kept for the newline.
        let n = text.len().min(self.bytes.len() - 1 - self.len);
        self.bytes[self.len..self.len + n].copy_from_slice(&text.as_bytes()[..n]);
        self.len += n;
        Ok(())
    }
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    let mut line = Line { bytes: [0; 256], len: 0 };
    let _ = write!(line, "usmc: {info}");
    line.bytes[line.len] = b'\n';
    // SAFETY: the line's bytes; past our own export of write(2), for the stack may be what broke.
    unsafe { usmc::real::write(2, line.bytes.as_ptr().cast(), line.len + 1) };
    // SAFETY: always allowed.
    unsafe { libc::abort() }
}

// The precompiled `core` names a personality routine in its unwind tables, which nothing ever walks here.
core::arch::global_asm!(
    ".hidden rust_eh_personality",
    ".globl rust_eh_personality",
    ".type rust_eh_personality, %function",
    "rust_eh_personality:",
    ".size rust_eh_personality, . - rust_eh_personality",
);
