//! A GPU, its one stream, its memory and its kernels: everything that calls the driver, behind types that cannot be misused.

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::Pod;
use cudarc::driver::sys::{CUdevice_attribute as Attribute, CUdeviceptr, CUfunction, CUfunction_attribute, CUmodule};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result, sys};
use kvern_base::AllocError;

use crate::compile::{self, MODULES};

/// Why a GPU cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A library is not installed.
    #[error("{library} was not found; {hint}")]
    Library {
        /// Its name.
        library: &'static str,
        /// What to install.
        hint: &'static str,
    },
    /// There is no such device.
    #[error("there is no CUDA device {asked}; {count} found")]
    Device {
        /// The number asked for.
        asked: usize,
        /// Devices there are.
        count: usize,
    },
    /// The device is too old.
    #[error("{name} has compute capability {major}.{minor}; 8.0 or above is needed")]
    Capability {
        /// The device.
        name: String,
        /// Its capability.
        major: i32,
        /// Its capability.
        minor: i32,
    },
    /// Kernels do not compile.
    #[error("NVRTC cannot compile `{module}` for {architecture}: {log}")]
    Compile {
        /// The source.
        module: &'static str,
        /// For what.
        architecture: String,
        /// What NVRTC says.
        log: String,
    },
    /// The driver refuses a call.
    #[error("CUDA cannot {action}: {source}")]
    Driver {
        /// What was tried.
        action: &'static str,
        /// The driver's reason.
        source: DriverError,
    },
    /// Device memory ran out.
    #[error(transparent)]
    Alloc(#[from] AllocError),
}

impl From<Error> for kvern_backend::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Alloc(error) => Self::Alloc(error),
            error => Self::Device(Box::new(error)),
        }
    }
}

/// Names what was tried when the driver refuses.
pub(crate) trait Trying<T> {
    fn trying(self, action: &'static str) -> Result<T, Error>;
}

impl<T> Trying<T> for Result<T, DriverError> {
    fn trying(self, action: &'static str) -> Result<T, Error> {
        self.map_err(|source| Error::Driver { action, source })
    }
}

/// A kernel's arguments: anything that a kernel takes by value.
pub(crate) trait Argument {
    fn pointer(&self) -> *mut c_void {
        std::ptr::from_ref(self).cast_mut().cast()
    }
}

impl Argument for u32 {}
impl Argument for u64 {}
impl Argument for f32 {}

/// A GPU with compiled kernels. Clones are the same one.
#[derive(Clone)]
pub(crate) struct Device(Arc<Inner>);

struct Inner {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    functions: BTreeMap<&'static str, Function>,
    modules: Vec<CUmodule>,
    properties: Properties,
}

/// What is known of the GPU.
#[derive(Debug, Clone)]
pub(crate) struct Properties {
    pub(crate) name: String,
    pub(crate) architecture: String,
    pub(crate) multiprocessors: u32,
    /// Bytes of shared memory that a block may have.
    pub(crate) shared: u32,
    /// Whether a kernel may be started before the one before it has ended.
    early: bool,
}

#[derive(Clone, Copy)]
struct Function(CUfunction);

// SAFETY: a function's handle is valid on every thread for as long as its module is loaded.
unsafe impl Send for Function {}
// SAFETY: as above; the driver locks what it needs to.
unsafe impl Sync for Function {}
// SAFETY: module handles are only used to unload them, once.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// The size of a launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grid {
    pub(crate) blocks: (u32, u32, u32),
    pub(crate) threads: u32,
    /// Bytes of dynamic shared memory.
    pub(crate) shared: u32,
}

impl Grid {
    pub(crate) fn new(blocks: impl Into<Blocks>, threads: u32) -> Self {
        Self { blocks: blocks.into().0, threads, shared: 0 }
    }

    /// A block for each row, with threads for its width.
    pub(crate) fn rows(rows: usize, width: usize) -> Self {
        Self::new(rows as u32, (width as u32).next_multiple_of(32).clamp(32, 256))
    }

    /// Blocks of 256 threads for `count` values, each of which may take several.
    pub(crate) fn values(count: usize) -> Self {
        Self::new((count as u32).div_ceil(256).clamp(1, 4096), 256)
    }
}

/// Blocks of a grid of one to three dimensions.
pub(crate) struct Blocks((u32, u32, u32));

impl From<u32> for Blocks {
    fn from(x: u32) -> Self {
        Self((x, 1, 1))
    }
}

impl From<(u32, u32)> for Blocks {
    fn from((x, y): (u32, u32)) -> Self {
        Self((x, y, 1))
    }
}

impl From<(u32, u32, u32)> for Blocks {
    fn from(blocks: (u32, u32, u32)) -> Self {
        Self(blocks)
    }
}

impl Device {
    /// Opens a GPU and compiles its kernels, or finds them compiled.
    pub(crate) fn open(ordinal: usize) -> Result<Self, Error> {
        // SAFETY: looking for a library only runs its initialisers.
        if !unsafe { sys::is_culib_present() } {
            let hint = "it comes with NVIDIA's driver";
            return Err(Error::Library { library: "the CUDA driver (libcuda)", hint });
        }
        result::init().trying("start the driver")?;
        let count = result::device::get_count().trying("count devices")? as usize;
        if ordinal >= count {
            return Err(Error::Device { asked: ordinal, count });
        }
        let context = CudaContext::new(ordinal).trying("open the device")?;
        let name = context.name().trying("name the device")?;
        let (major, minor) = context.compute_capability().trying("ask for the compute capability")?;
        if major < 8 {
            return Err(Error::Capability { name, major, minor });
        }
        // Instructions that one architecture alone has.
        let suffix = if major == 9 { "a" } else { "" };
        let attribute = |attribute| context.attribute(attribute).trying("ask for a property");
        let properties = Properties {
            name,
            architecture: format!("sm_{major}{minor}{suffix}"),
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
            shared: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as u32,
            early: major >= 9,
        };
        let stream = context.new_stream().trying("make a stream")?;
        let (mut functions, mut modules) = (BTreeMap::new(), Vec::new());
        for module in MODULES {
            let image = compile::image(module, &properties.architecture)?;
            // SAFETY: the image is one that NVRTC made, complete in memory.
            let loaded = unsafe { result::module::load_data(image.as_ptr().cast()) }.trying("load kernels")?;
            modules.push(loaded);
            for name in module.kernels {
                let c_name = CString::new(*name).unwrap_or_default();
                // SAFETY: the module was just loaded.
                let function = unsafe { result::module::get_function(loaded, c_name) }.trying("find a kernel")?;
                // A kernel may ask for all the shared memory that the device has, less what it declares.
                // SAFETY: the function is of a loaded module.
                let declared = unsafe {
                    result::function::get_function_attribute(
                        function,
                        CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
                    )
                };
                let most = properties.shared as i32 - declared.trying("ask a kernel for its shared memory")?;
                // SAFETY: as above.
                unsafe {
                    result::function::set_function_attribute(
                        function,
                        CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                        most,
                    )
                }
                .trying("raise a kernel's shared memory")?;
                functions.insert(*name, Function(function));
            }
        }
        let inner = Inner { context, stream, functions, modules, properties };
        Ok(Self(Arc::new(inner)))
    }

    pub(crate) fn properties(&self) -> &Properties {
        &self.0.properties
    }

    pub(crate) fn stream(&self) -> &Arc<CudaStream> {
        &self.0.stream
    }

    /// Makes this thread one that may call the driver.
    pub(crate) fn bind(&self) -> Result<(), Error> {
        self.0.context.bind_to_thread().trying("use the device on this thread")
    }

    /// Bytes that are free.
    pub(crate) fn free(&self) -> Result<u64, Error> {
        self.bind()?;
        Ok(result::mem_get_info().trying("ask for free memory")?.0 as u64)
    }

    /// Allocates bytes, not initialised.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<Memory, Error> {
        self.bind()?;
        // SAFETY: the memory is only read by kernels after others have written it.
        let address = unsafe { result::malloc_sync(bytes.max(256)) }.map_err(|_| AllocError { bytes })?;
        Ok(Memory { device: self.clone(), address, bytes })
    }

    /// Waits for everything that was enqueued.
    pub(crate) fn wait(&self) -> Result<(), Error> {
        self.bind()?;
        self.0.stream.synchronize().trying("finish its work")
    }

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// The arguments must be those of the kernel, and what they point at must be large enough for what the kernel does in this grid, and stay allocated
    /// until it has run. Memory is freed in the order of the stream, so that holding it until this call returns is enough.
    pub(crate) unsafe fn launch(
        &self,
        name: &'static str,
        grid: Grid,
        arguments: &[&dyn Argument],
    ) -> Result<(), Error> {
        let mut pointers = [std::ptr::null_mut(); 16];
        debug_assert!(arguments.len() <= pointers.len());
        for (pointer, argument) in pointers.iter_mut().zip(arguments) {
            *pointer = argument.pointer();
        }
        let Function(function) = self.0.functions[name];
        if grid.blocks.0 == 0 || grid.blocks.1 == 0 || grid.blocks.2 == 0 {
            return Ok(());
        }
        // Kernels wait by themselves for what they need of those before (`wait_for_earlier_kernels`), so they may be started early.
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let (x, y, z) = grid.blocks;
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared,
            hStream: self.0.stream.cu_stream(),
            attrs: &mut early,
            numAttrs: u32::from(self.0.properties.early),
        };
        // SAFETY: the function is of a loaded module, and the caller answers for the arguments.
        unsafe { sys::cuLaunchKernelEx(&config, function, pointers.as_mut_ptr(), std::ptr::null_mut()) }
            .result()
            .trying("start a kernel")
    }

    /// A mark in the stream whose time can be read.
    pub(crate) fn mark(&self) -> Result<CudaEvent, Error> {
        self.bind()?;
        self.0.stream.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).trying("record an event")
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // A device that is lost cannot be tidied up, and need not be.
        let _ = self.context.bind_to_thread();
        let _ = self.stream.synchronize();
        for &module in &self.modules {
            // SAFETY: nothing runs any more, and nobody else has the module's functions.
            let _ = unsafe { result::module::unload(module) };
        }
    }
}

/// Device memory.
pub(crate) struct Memory {
    device: Device,
    address: CUdeviceptr,
    bytes: usize,
}

impl Memory {
    /// The address, for kernels.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    fn check(&self, at: usize, bytes: usize) {
        assert!(at.checked_add(bytes).is_some_and(|end| end <= self.bytes), "a copy past the end of device memory");
    }

    /// Enqueues a copy of values to byte `at`, and waits until they have been taken.
    pub(crate) fn write<T: Pod>(&self, at: usize, values: &[T]) -> Result<(), Error> {
        self.check(at, size_of_val(values));
        self.device.bind()?;
        let stream = self.device.stream().cu_stream();
        // SAFETY: the range was checked. The driver has taken pageable memory by the time it returns, or is waited for.
        unsafe { result::memcpy_htod_async(self.address + at as u64, values, stream) }.trying("copy to the device")?;
        self.device.wait()
    }

    /// Enqueues a copy from pinned memory.
    pub(crate) fn take(&self, from: &Pinned, bytes: usize) -> Result<(), Error> {
        self.check(0, bytes);
        let stream = self.device.stream().cu_stream();
        // SAFETY: both ranges were checked; the owner of `from` does not write to it before the copy's event.
        unsafe { result::memcpy_htod_async(self.address, &from.bytes()[..bytes], stream) }.trying("copy to the device")
    }

    /// Copies values from byte `at`, waiting for everything before.
    pub(crate) fn read<T: Pod>(&self, at: usize, values: &mut [T]) -> Result<(), Error> {
        self.check(at, size_of_val(values));
        self.device.bind()?;
        let stream = self.device.stream().cu_stream();
        // SAFETY: the range was checked, and the copy is waited for while `values` is borrowed.
        unsafe { result::memcpy_dtoh_async(values, self.address + at as u64, stream) }
            .trying("copy from the device")?;
        self.device.wait()
    }

    /// Enqueues a copy into pinned memory.
    pub(crate) fn give(&self, to: &mut Pinned, bytes: usize) -> Result<(), Error> {
        self.check(0, bytes);
        let stream = self.device.stream().cu_stream();
        // SAFETY: both ranges were checked; the owner of `to` reads it after the copy's event.
        unsafe { result::memcpy_dtoh_async(&mut to.bytes_mut()[..bytes], self.address, stream) }
            .trying("copy from the device")
    }

    /// Enqueues zeros over all bytes.
    pub(crate) fn clear(&self) -> Result<(), Error> {
        self.device.bind()?;
        // SAFETY: exactly the allocation.
        unsafe { result::memset_d8_async(self.address, 0, self.bytes, self.device.stream().cu_stream()) }
            .trying("clear memory")
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // What is enqueued may still use it. A device that is lost has nothing to free.
            let _ = self.device.wait();
            // SAFETY: allocated once, freed once, and nothing runs that names it.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Host memory that the device reads and writes directly.
pub(crate) struct Pinned {
    device: Device,
    address: *mut u8,
    len: usize,
}

// SAFETY: it owns its bytes, as a `Vec<u8>` does.
unsafe impl Send for Pinned {}
// SAFETY: shared access only reads.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub(crate) fn new(device: &Device, len: usize) -> Result<Self, Error> {
        device.bind()?;
        // SAFETY: the bytes are initialised below, before anyone can read them.
        let address =
            unsafe { result::malloc_host(len.max(1), 0) }.map_err(|_| AllocError { bytes: len })?.cast::<u8>();
        // SAFETY: the block was just allocated with this length.
        unsafe { address.write_bytes(0, len) };
        Ok(Self { device: device.clone(), address, len })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: an initialised block of this length, owned by `self`.
        unsafe { std::slice::from_raw_parts(self.address, self.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            let _ = self.device.wait();
            // SAFETY: allocated once, freed once, and no copy is under way.
            let _ = unsafe { result::free_host(self.address.cast()) };
        }
    }
}

/// Locks what cannot be left half-done by a panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Seconds between two marks, waiting for the second.
pub(crate) fn between(start: &CudaEvent, end: &CudaEvent) -> Result<f64, Error> {
    end.synchronize().trying("wait for an event")?;
    Ok(f64::from(start.elapsed_ms(end).trying("read an event")?) / 1e3)
}
