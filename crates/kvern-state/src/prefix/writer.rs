//! Checkpoints written in the background, one after another, from a queue of bounded length.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, channel, sync_channel};
use std::thread::JoinHandle;

use super::tree::Id;
use crate::{Image, ImageError};

/// Images that may wait; more are refused, so that a slow disk costs entries and not time.
const QUEUE: usize = 16;

struct Job {
    id: Id,
    image: Arc<Image>,
    path: PathBuf,
}

/// What became of a job.
pub(crate) struct Written {
    pub(crate) id: Id,
    pub(crate) path: PathBuf,
    pub(crate) outcome: Result<u64, ImageError>,
}

/// A thread that saves images.
pub(crate) struct Writer {
    jobs: Option<SyncSender<Job>>,
    written: Receiver<Written>,
    waiting: usize,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer").field("waiting", &self.waiting).finish_non_exhaustive()
    }
}

impl Writer {
    pub(crate) fn new() -> std::io::Result<Self> {
        let (jobs, queue) = sync_channel::<Job>(QUEUE);
        let (report, written) = channel();
        let thread = std::thread::Builder::new().name("kvern-checkpoints".into()).spawn(move || {
            for Job { id, image, path } in queue {
                let outcome = image.save(&path);
                if report.send(Written { id, path, outcome }).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { jobs: Some(jobs), written, waiting: 0, thread: Some(thread) })
    }

    /// Queues an image; false when the queue is full. With `wait`, it waits for room instead.
    pub(crate) fn write(&mut self, id: Id, image: Arc<Image>, path: PathBuf, wait: bool) -> bool {
        let Some(jobs) = &self.jobs else { return false };
        let job = Job { id, image, path };
        let queued = if wait {
            jobs.send(job).is_ok()
        } else {
            match jobs.try_send(job) {
                Ok(()) => true,
                Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => false,
            }
        };
        self.waiting += usize::from(queued);
        queued
    }

    /// Something that has been written since; with `wait`, waits for it if anything is on its way.
    pub(crate) fn next(&mut self, wait: bool) -> Option<Written> {
        let written = if wait && self.waiting > 0 { self.written.recv().ok() } else { self.written.try_recv().ok() };
        self.waiting -= usize::from(written.is_some());
        written
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A panic in the thread has been printed; there is nobody to hand it to.
            let _ = thread.join();
        }
    }
}
