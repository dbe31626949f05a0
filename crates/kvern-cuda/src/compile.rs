//! Compiling kernels for a device with NVRTC, once: images are kept on disk under a hash of source, options, architecture and compiler.

use std::ffi::CString;
use std::fs;
use std::path::PathBuf;

use cudarc::nvrtc::{result, sys};
use xxhash_rust::xxh3::xxh3_128;

use crate::device::Error;

/// One file of kernels.
#[derive(Debug, Clone, Copy)]
pub struct Module {
    /// The file's name.
    pub name: &'static str,
    source: &'static str,
    /// What it defines.
    pub kernels: &'static [&'static str],
}

/// The kernels of all products.
macro_rules! products {
    ($($packing:literal)*) => {
        &[
            $(
                concat!($packing, "_one"), concat!($packing, "_few"), concat!($packing, "_narrow8"), concat!($packing, "_narrow16"), concat!($packing, "_narrow32"),
                concat!($packing, "_narrow64"), concat!($packing, "_wide"),
            )*
            "exact", "prepare", "pack_raw", "pack_codes", "pack_scales", "embed",
        ]
    };
}

/// Every file of kernels.
pub const MODULES: &[Module] = &[
    Module {
        name: "linear.cu",
        source: include_str!("kernels/linear.cu"),
        kernels: products!("half" "brain" "codes4" "codes8"),
    },
    Module {
        name: "attention.cu",
        source: include_str!("kernels/attention.cu"),
        kernels: &[
            "attend_any",
            "attend_decode_f16_64",
            "attend_decode_f16_128",
            "attend_decode_bf16_64",
            "attend_decode_bf16_128",
            "attend_window_f16_64",
            "attend_window_f16_128",
            "attend_window_bf16_64",
            "attend_window_bf16_128",
            "attend_merge_64",
            "attend_merge_128",
        ],
    },
    Module {
        name: "elementwise.cu",
        source: include_str!("kernels/elementwise.cu"),
        kernels: &[
            "rms_norm",
            "rope_angles",
            "rope",
            "activate",
            "scale",
            "slice",
            "softcap",
            "decay",
            "gather",
            "resolve",
            "read_all",
            "multiply_all",
        ],
    },
    Module { name: "recurrent.cu", source: include_str!("kernels/recurrent.cu"), kernels: &["convolve", "delta_rule"] },
    Module {
        name: "pages.cu",
        source: include_str!("kernels/pages.cu"),
        kernels: &["append", "rope_append", "exchange", "encode", "copy_pages"],
    },
    Module { name: "draw.cu", source: include_str!("kernels/draw.cu"), kernels: &["draw"] },
];

const COMMON: &str = include_str!("kernels/common.cuh");

/// A module's whole source.
pub fn source(module: &Module) -> String {
    format!("{COMMON}\n#line 1 \"{}\"\n{}", module.name, module.source)
}

/// Options besides the architecture.
pub const OPTIONS: [&str; 2] = ["--std=c++17", "-default-device"];

/// Where images are kept: `KVERN_CACHE`, or the user's cache.
fn cache() -> Option<PathBuf> {
    let own = std::env::var_os("KVERN_CACHE").map(PathBuf::from);
    let user = || std::env::var_os("XDG_CACHE_HOME").map(|path| PathBuf::from(path).join("kvern"));
    let home = || std::env::var_os("HOME").map(|path| PathBuf::from(path).join(".cache/kvern"));
    Some(own.or_else(user).or_else(home)?.join("kernels"))
}

/// A module's machine code for an architecture, such as `sm_90a`.
pub(crate) fn image(module: &Module, architecture: &str) -> Result<Vec<u8>, Error> {
    let source = source(module);
    // SAFETY: looking for a library only runs its initialisers.
    let present = unsafe { sys::is_culib_present() };
    let version = if present { version() } else { (0, 0) };
    let options: Vec<String> =
        [format!("--gpu-architecture={architecture}")].into_iter().chain(OPTIONS.map(String::from)).collect();
    let key = xxh3_128(format!("{source}\0{options:?}\0{version:?}").as_bytes());
    let kept = cache().map(|directory| directory.join(format!("{}-{architecture}-{key:032x}.cubin", module.name)));
    if let Some(image) = kept.as_ref().and_then(|path| fs::read(path).ok()).filter(|image| !image.is_empty()) {
        return Ok(image);
    }
    if !present {
        let hint = "it comes with the CUDA toolkit, and as the PyPI package nvidia-cuda-nvrtc";
        return Err(Error::Library { library: "NVRTC (libnvrtc)", hint });
    }
    let image = compile(module.name, &source, &options).map_err(|log| Error::Compile {
        module: module.name,
        architecture: architecture.into(),
        log,
    })?;
    // Without a cache, the next start compiles again.
    if let Some(path) = kept {
        let partial = path.with_extension(format!("{}.part", std::process::id()));
        let _ = path.parent().map(fs::create_dir_all);
        if fs::write(&partial, &image).is_ok() {
            let _ = fs::rename(partial, path);
        }
    }
    Ok(image)
}

fn version() -> (i32, i32) {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: two integers to write to; NVRTC was found.
    unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
    (major, minor)
}

/// Compiles a source; what NVRTC says when it cannot.
fn compile(name: &str, source: &str, options: &[String]) -> Result<Vec<u8>, String> {
    let text = |error: result::NvrtcError| format!("{error:?}");
    let (source, name) = (CString::new(source), CString::new(name));
    let (Ok(source), Ok(name)) = (source, name) else { return Err("a source with a NUL".into()) };
    let program = result::create_program(&source, Some(&name)).map_err(text)?;
    // SAFETY: the program was just made, and its source outlives it.
    let compiled = unsafe { result::compile_program(program, options) };
    let image = match compiled {
        // SAFETY: as above, and compiled.
        Ok(()) => unsafe { machine_code(program) }.map_err(text),
        Err(error) => {
            // SAFETY: as above.
            let log = unsafe { result::get_program_log(program) }.unwrap_or_default();
            let log: Vec<u8> = log.into_iter().map(|c| c as u8).take_while(|&c| c != 0).collect();
            Err(format!("{error:?}: {}", String::from_utf8_lossy(&log)))
        }
    };
    // SAFETY: destroyed once, here.
    unsafe { result::destroy_program(program) }.map_err(text)?;
    image
}

/// # Safety
/// The program must have been compiled.
unsafe fn machine_code(program: sys::nvrtcProgram) -> Result<Vec<u8>, result::NvrtcError> {
    let mut size = 0;
    // SAFETY: the program is compiled; a size to write to.
    unsafe { sys::nvrtcGetCUBINSize(program, &mut size) }.result()?;
    let mut image = vec![0u8; size];
    // SAFETY: as many bytes as NVRTC asked for.
    unsafe { sys::nvrtcGetCUBIN(program, image.as_mut_ptr().cast()) }.result()?;
    Ok(image)
}
