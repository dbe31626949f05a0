//! A machine without a GPU is told what it lacks.

use kvern_cuda::{Cuda, CudaOptions, Error};

#[test]
fn a_gpu_that_is_not_there_is_an_error_that_says_so() {
    let absent = Cuda::new(&CudaOptions { device: 1000, ..CudaOptions::default() }).map(drop).unwrap_err();
    match absent {
        Error::Library { .. } => assert!(absent.to_string().contains("NVIDIA's driver"), "{absent}"),
        Error::Device { asked: 1000, .. } | Error::Driver { .. } => {}
        other => panic!("{other}"),
    }
}
