//! Symbols of the libraries that are loaded, found by reading what the dynamic linker reads: no dlsym(3), which is in a
//! library of its own before glibc 2.34, and no version, of which one that a libc lacks would keep programs from starting.
//!
//! dl_iterate_phdr(3) shows the libraries in the order in which the dynamic linker searches those that a program was started
//! with. [`Place::BehindUs`] is therefore what RTLD_NEXT is. Of several versions of a symbol the default one counts, as
//! with dlsym. (The System V ABI's chapter 5, and for the GNU hash table the sources of binutils and of both dynamic linkers.)

use core::ffi::{CStr, c_int, c_void};
use core::mem;
use core::ptr;
use core::slice;
#[cfg(target_pointer_width = "32")]
use libc::{Elf32_Phdr as Segment, Elf32_Sym as Symbol};
#[cfg(target_pointer_width = "64")]
use libc::{Elf64_Phdr as Segment, Elf64_Sym as Symbol};
use usmc_shm::sync::AtomicPtr;
use usmc_shm::sync::Ordering::Relaxed;

/// Which libraries are looked at, the first one first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// All, and the program before them.
    Anywhere,
    /// Those behind the library that this code is in.
    BehindUs,
}

/// A symbol that is looked for, and where its address goes.
pub struct Wanted<'a> {
    name: &'a CStr,
    hash: u32,
    found: &'a AtomicPtr<c_void>,
}

impl<'a> Wanted<'a> {
    /// The address of `name` goes to `found`, unless something is there already.
    pub const fn new(name: &'a CStr, found: &'a AtomicPtr<c_void>) -> Wanted<'a> {
        Wanted { name, hash: gnu_hash(name), found }
    }
}

/// Shows each library that is loaded, and the program before them. Must not be called by a signal handler: the dynamic linker has
/// a lock.
fn each<F: FnMut(&libc::dl_phdr_info)>(mut show: F) {
    /// # Safety
    /// What dl_iterate_phdr(3) calls, with the address of an `F`.
    unsafe extern "C" fn look<F: FnMut(&libc::dl_phdr_info)>(
        info: *mut libc::dl_phdr_info,
        _size: libc::size_t,
        show: *mut c_void,
    ) -> c_int {
        // SAFETY: the caller's contract.
        unsafe { (*show.cast::<F>())(&*info) };
        0
    }
    // SAFETY: the callback gets its own data back, before this returns.
    unsafe { libc::dl_iterate_phdr(Some(look::<F>), (&raw mut show).cast()) };
}

/// Looks all of them up. What is nowhere stays null. As [`each`].
pub fn find_all(place: Place, wanted: &[Wanted<'_>]) {
    let mut is_begun = place == Place::Anywhere;
    each(|info| {
        // SAFETY: the library stays loaded while it is shown.
        let Some(library) = (unsafe { Library::of(info) }) else { return };
        if !is_begun {
            is_begun = library.contains(find as *const () as usize);
            return;
        }
        for one in wanted.iter().filter(|one| one.found.load(Relaxed).is_null()) {
            // SAFETY: as above.
            one.found.store(unsafe { library.find(one) }, Relaxed);
        }
    });
}

/// The address of a symbol, or null.
pub fn find(place: Place, name: &CStr) -> *mut c_void {
    let found = AtomicPtr::new(ptr::null_mut());
    find_all(place, &[Wanted::new(name, &found)]);
    found.load(Relaxed)
}

/// Whether a library of this file name is loaded, in whatever directory it lies. As [`each`].
pub fn is_loaded(file: &CStr) -> bool {
    let mut is_there = false;
    each(|info| {
        if !info.dlpi_name.is_null() {
            // SAFETY: the dynamic linker's own, and NUL-terminated.
            let path = unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes();
            is_there |= path.rsplit(|byte| *byte == b'/').next() == Some(file.to_bytes());
        }
    });
    is_there
}

/// `Elf32_Dyn` or `Elf64_Dyn`.
#[repr(C)]
struct Entry {
    tag: isize,
    value: usize,
}

const DT_NULL: isize = 0;
const DT_HASH: isize = 4;
const DT_STRTAB: isize = 5;
const DT_SYMTAB: isize = 6;
const DT_GNU_HASH: isize = 0x6fff_fef5;
const DT_VERSYM: isize = 0x6fff_fff0;
/// In a symbol's version: it is not the default one.
const VERSYM_HIDDEN: u16 = 0x8000;

/// What a symbol is (`st_info`).
const STT_NOTYPE: u8 = 0;
const STT_OBJECT: u8 = 1;
const STT_FUNC: u8 = 2;
const STT_COMMON: u8 = 5;
const STT_GNU_IFUNC: u8 = 10;
/// How it is seen by others (`st_other`).
const STV_DEFAULT: u8 = 0;
const STV_PROTECTED: u8 = 3;
const SHN_UNDEF: u16 = 0;

/// The tables of a loaded library; of the pointers some may be null.
struct Library {
    base: usize,
    start: usize,
    end: usize,
    symbols: *const Symbol,
    names: *const u8,
    versions: *const u16,
    gnu_hash: *const u32,
    hash: *const u32,
}

impl Library {
    /// `None` for what has no symbols.
    ///
    /// # Safety
    /// A library that stays loaded while this is used.
    unsafe fn of(info: &libc::dl_phdr_info) -> Option<Library> {
        let base = info.dlpi_addr as usize;
        if info.dlpi_phdr.is_null() {
            return None;
        }
        // SAFETY: the caller's contract.
        let segments: &[Segment] =
            unsafe { slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
        let loaded = || segments.iter().filter(|s| s.p_type == libc::PT_LOAD);
        let at = |address: usize| base.wrapping_add(address);
        let mut library = Library {
            base,
            start: loaded().map(|s| at(s.p_vaddr as usize)).min()?,
            end: loaded().map(|s| at((s.p_vaddr + s.p_memsz) as usize)).max()?,
            symbols: ptr::null(),
            names: ptr::null(),
            versions: ptr::null(),
            gnu_hash: ptr::null(),
            hash: ptr::null(),
        };
        let dynamic = segments.iter().find(|s| s.p_type == libc::PT_DYNAMIC)?;
        let mut entry = ptr::with_exposed_provenance::<Entry>(at(dynamic.p_vaddr as usize));
        // SAFETY: the dynamic section lies in a segment of the library, and DT_NULL ends it.
        while let Entry { tag, value } = unsafe { entry.read() }
            && tag != DT_NULL
        {
            match tag {
                DT_SYMTAB => library.symbols = library.table(value),
                DT_STRTAB => library.names = library.table(value),
                DT_VERSYM => library.versions = library.table(value),
                DT_GNU_HASH => library.gnu_hash = library.table(value),
                DT_HASH => library.hash = library.table(value),
                _ => {}
            }
            // SAFETY: DT_NULL is still to come.
            entry = unsafe { entry.add(1) };
        }
        (!library.symbols.is_null() && !library.names.is_null()).then_some(library)
    }

    fn contains(&self, address: usize) -> bool {
        (self.start..self.end).contains(&address)
    }

    /// glibc mostly has written addresses there by now, musl leaves what the file says.
    fn table<T>(&self, value: usize) -> *const T {
        let is_address = self.contains(value);
        ptr::with_exposed_provenance(if is_address { value } else { self.base + value })
    }

    /// Where `wanted` is, or null.
    ///
    /// # Safety
    /// The library is loaded.
    unsafe fn find(&self, wanted: &Wanted<'_>) -> *mut c_void {
        // SAFETY: the caller's contract.
        let symbol = unsafe {
            match self.gnu_hash.is_null() {
                false => self.by_gnu_hash(wanted),
                true => self.by_hash(wanted),
            }
        };
        let Some(symbol) = symbol else { return ptr::null_mut() };
        let found = ptr::with_exposed_provenance_mut(self.base + symbol.st_value as usize);
        match symbol.st_info & 15 {
            // SAFETY: as above.
            STT_GNU_IFUNC => unsafe { chosen_by(found) },
            _ => found,
        }
    }

    /// # Safety
    /// As [`Library::find`]; there is such a table.
    unsafe fn by_gnu_hash(&self, wanted: &Wanted<'_>) -> Option<&Symbol> {
        const BITS: u32 = usize::BITS;
        let (table, hash) = (self.gnu_hash, wanted.hash);
        // SAFETY: the table is of that layout: four numbers, the filter's words, the buckets, and a word for each symbol
        // from the first one in it on, of which the lowest bit ends a bucket.
        unsafe {
            let [buckets, first, words, shift] = *table.cast::<[u32; 4]>();
            if buckets == 0 || words == 0 {
                return None;
            }
            let filter = table.add(4).cast::<usize>();
            let word = *filter.add((hash / BITS % words) as usize);
            if word >> (hash % BITS) & 1 == 0 || word >> ((hash >> shift) % BITS) & 1 == 0 {
                return None;
            }
            let heads = filter.add(words as usize).cast::<u32>();
            let chains = heads.add(buckets as usize);
            let mut at = *heads.add((hash % buckets) as usize);
            while at >= first && at != 0 {
                let chained = *chains.add((at - first) as usize);
                if chained | 1 == hash | 1
                    && let Some(symbol) = self.matching(at, wanted.name)
                {
                    return Some(symbol);
                }
                if chained & 1 != 0 {
                    return None;
                }
                at += 1;
            }
        }
        None
    }

    /// # Safety
    /// As [`Library::find`].
    unsafe fn by_hash(&self, wanted: &Wanted<'_>) -> Option<&Symbol> {
        if self.hash.is_null() {
            return None;
        }
        // SAFETY: the table is of that layout: two numbers, the buckets, and a word for each symbol, which leads to the next.
        unsafe {
            let [buckets, _] = *self.hash.cast::<[u32; 2]>();
            if buckets == 0 {
                return None;
            }
            let heads = self.hash.add(2);
            let chains = heads.add(buckets as usize);
            let mut at = *heads.add((sysv_hash(wanted.name) % buckets) as usize);
            while at != 0 {
                if let Some(symbol) = self.matching(at, wanted.name) {
                    return Some(symbol);
                }
                at = *chains.add(at as usize);
            }
        }
        None
    }

    /// The symbol of that index, if it is a definition of `name` that others may use.
    ///
    /// # Safety
    /// As [`Library::find`]; there is a symbol of that index.
    unsafe fn matching(&self, index: u32, name: &CStr) -> Option<&Symbol> {
        let index = index as usize;
        // SAFETY: the caller's contract.
        let (symbol, is_default) = unsafe {
            let is_default =
                self.versions.is_null() || self.versions.add(index).read() & VERSYM_HIDDEN == 0;
            (&*self.symbols.add(index), is_default)
        };
        let is_defined = symbol.st_shndx != SHN_UNDEF && symbol.st_value != 0;
        let has_address = matches!(
            symbol.st_info & 15,
            STT_NOTYPE | STT_OBJECT | STT_FUNC | STT_COMMON | STT_GNU_IFUNC
        );
        let is_seen = matches!(symbol.st_other & 3, STV_DEFAULT | STV_PROTECTED);
        if !is_default || !is_defined || !has_address || !is_seen {
            return None;
        }
        // SAFETY: names end with a NUL inside their table.
        let its = unsafe { CStr::from_ptr(self.names.add(symbol.st_name as usize).cast()) };
        (its == name).then_some(symbol)
    }
}

/// The function that a resolver chooses for this processor; null where resolvers want arguments.
///
/// # Safety
/// The resolver of a library that is loaded.
unsafe fn chosen_by(resolver: *mut c_void) -> *mut c_void {
    if cfg!(any(target_arch = "x86_64", target_arch = "x86")) {
        // SAFETY: on these machines it takes no arguments.
        unsafe { mem::transmute::<*mut c_void, extern "C" fn() -> *mut c_void>(resolver)() }
    } else {
        ptr::null_mut()
    }
}

const fn gnu_hash(name: &CStr) -> u32 {
    let (bytes, mut hash, mut i) = (name.to_bytes(), 5381u32, 0);
    while i < bytes.len() {
        hash = hash.wrapping_mul(33).wrapping_add(bytes[i] as u32);
        i += 1;
    }
    hash
}

fn sysv_hash(name: &CStr) -> u32 {
    name.to_bytes().iter().fold(0, |hash: u32, &byte| {
        let hash = (hash << 4).wrapping_add(u32::from(byte));
        (hash ^ (hash >> 24 & 0xf0)) & 0x0fff_ffff
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_the_standards() {
        assert_eq!(gnu_hash(c"printf"), 0x156b_2bb8);
        assert_eq!(sysv_hash(c"printf"), 0x0779_05a6);
        assert_eq!(gnu_hash(c""), 5381);
    }

    #[test]
    fn a_library_is_found_by_its_file_name() {
        assert!(is_loaded(c"libc.so.6"));
        assert!(!is_loaded(c"libc.so") && !is_loaded(c"so.6") && !is_loaded(c"libnothing.so.1"));
    }

    /// What dlsym(3) finds with RTLD_NEXT.
    fn next(name: &CStr) -> *mut c_void {
        // SAFETY: a NUL-terminated name.
        unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) }
    }

    #[test]
    fn functions_are_those_that_dlsym_finds() {
        // Of some there are several versions; memcpy is chosen for the processor.
        for name in [c"read", c"posix_spawn", c"fork", c"memcpy", c"aio_read", c"_IO_file_jumps"] {
            let found = find(Place::BehindUs, name);
            assert!(!found.is_null() && found == next(name), "{name:?}: {found:?}");
        }
        assert!(find(Place::BehindUs, c"usmc_no_such_symbol").is_null());
    }

    #[test]
    fn a_program_that_has_a_variable_of_libcs_has_it_before_libc() {
        // SAFETY: a NUL-terminated name.
        let stderr = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"stderr".as_ptr()) };
        assert_eq!(find(Place::Anywhere, c"stderr"), stderr);
    }

    #[test]
    fn both_tables_lead_to_the_same_symbols() {
        struct Both(u32);
        /// # Safety
        /// What dl_iterate_phdr(3) calls.
        unsafe extern "C" fn compare(
            info: *mut libc::dl_phdr_info,
            _size: libc::size_t,
            data: *mut c_void,
        ) -> c_int {
            // SAFETY: the caller's contract.
            let (both, library) = unsafe { (&mut *data.cast::<Both>(), Library::of(&*info)) };
            let Some(library) = library else { return 0 };
            if library.gnu_hash.is_null() || library.hash.is_null() {
                return 0;
            }
            let unused = AtomicPtr::new(ptr::null_mut());
            for name in [c"read", c"_r_debug", c"__vdso_clock_gettime", c"nothing"] {
                let wanted = Wanted::new(name, &unused);
                // SAFETY: as above.
                let [one, other] =
                    unsafe { [library.by_gnu_hash(&wanted), library.by_hash(&wanted)] }
                        .map(|symbol| symbol.map(ptr::from_ref));
                assert_eq!(one, other, "{name:?}");
                both.0 += u32::from(one.is_some());
            }
            0
        }
        let mut both = Both(0);
        // SAFETY: the callback gets its own data back.
        unsafe { libc::dl_iterate_phdr(Some(compare), (&raw mut both).cast()) };
        // glibc's own libraries have both tables in many systems, but not in all; the vDSO had the older one alone.
        println!("{} symbols were found by both", both.0);
    }
}
