//! Recorded steps: what the verbs of a step enqueue, as one CUDA graph for each size.
//!
//! A size is run plainly the first time, so that everything it needs is allocated; recorded the second time; and then played. While a step is played its
//! verbs still check their operands, and enqueue nothing.

use std::collections::BTreeMap;

use cudarc::driver::{CudaGraph, sys};

use crate::device::{Device, Error, Trying};
use crate::step::Size;

/// What launches do at the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Mode {
    /// They are enqueued, or recorded where the stream records.
    #[default]
    Enqueue,
    /// A recorded step stands for them.
    Skip,
}

/// A recorded step.
struct Graph(CudaGraph);

// SAFETY: a graph is launched and dropped by whoever holds the lock on the recorder, one at a time.
unsafe impl Send for Graph {}

/// Every recorded step.
#[derive(Default)]
pub(crate) struct Recorder {
    /// By size; none for one that ran once.
    steps: BTreeMap<Size, Option<Graph>>,
}

/// How a step is to be run.
pub(crate) enum Way {
    Plain,
    Record,
    Play,
}

impl Recorder {
    pub(crate) fn way(&mut self, size: Size) -> Way {
        match self.steps.get(&size) {
            Some(Some(_)) => Way::Play,
            Some(None) => Way::Record,
            None => {
                self.steps.insert(size, None);
                Way::Plain
            }
        }
    }

    /// Forgets everything: an address that steps name has changed.
    pub(crate) fn clear(&mut self) {
        self.steps.clear();
    }

    /// Begins to record the stream.
    pub(crate) fn begin(device: &Device) -> Result<(), Error> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        device.stream().begin_capture(mode).trying("record a step")
    }

    /// Ends recording, and keeps what was recorded under `size` if it is given.
    pub(crate) fn end(&mut self, device: &Device, size: Option<Size>) -> Result<(), Error> {
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = device.stream().end_capture(flags).trying("record a step")?;
        if let (Some(size), Some(graph)) = (size, graph) {
            self.steps.insert(size, Some(Graph(graph)));
        }
        Ok(())
    }

    pub(crate) fn play(&self, size: Size) -> Result<(), Error> {
        match self.steps.get(&size) {
            Some(Some(Graph(graph))) => graph.launch().trying("play a recorded step"),
            _ => Ok(()),
        }
    }
}
