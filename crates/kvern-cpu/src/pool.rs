//! The thread pool: a fork-join region costs about a microsecond.
//!
//! **Why not a general pool.** A decode step of a small model has about 200 parallel regions of ten microseconds each. Workers
//! therefore spin for a moment after a region before they sleep, and items are claimed from one atomic counter.
//!
//! **Invariants.** [`Pool::run`] returns after every item has run and no worker can touch the closure any more. Which thread runs an
//! item never matters to its result: items write disjoint outputs.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// How often an idle worker looks for work before it sleeps: some hundred microseconds.
const SPINS: u32 = 20_000;

/// A region: a closure with its lifetime erased, and how its items are cut.
#[derive(Clone, Copy)]
struct Job {
    run: *const (dyn Fn(Range<usize>) + Sync),
    items: usize,
    grain: usize,
}

// SAFETY: the closure is `Sync`, and `Pool::run` keeps it alive until no worker uses the job.
unsafe impl Send for Job {}

struct Shared {
    /// Counts regions; a worker that sees a new number joins the region.
    epoch: AtomicU64,
    job: Mutex<Option<Job>>,
    next: AtomicUsize,
    /// Workers that have not yet left the current region.
    inside: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    sleepers: Mutex<usize>,
    wake: Condvar,
}

/// A fixed set of threads that run regions together with the caller.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// One region at a time, whoever calls.
    region: Mutex<()>,
}

impl Pool {
    /// A pool in which `threads` threads work, the caller included.
    ///
    /// # Errors
    /// The system's, when a thread cannot be started.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            epoch: AtomicU64::new(0),
            job: Mutex::new(None),
            next: AtomicUsize::new(0),
            inside: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleepers: Mutex::new(0),
            wake: Condvar::new(),
        });
        let mut pool = Self { shared, workers: Vec::new(), region: Mutex::new(()) };
        for index in 1..threads {
            let shared = pool.shared.clone();
            let worker = std::thread::Builder::new().name(format!("kvern-cpu-{index}"));
            pool.workers.push(worker.spawn(move || work(&shared))?);
        }
        Ok(pool)
    }

    /// Threads that work in a region.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `run` over `0..items` in ranges of at most `grain` items, on all threads, and waits for the end. Regions do not nest.
    ///
    /// # Panics
    /// When an item panics.
    pub fn run(&self, items: usize, grain: usize, run: impl Fn(Range<usize>) + Sync) {
        let grain = grain.max(1);
        if self.workers.is_empty() || items <= grain {
            if items > 0 {
                run(0..items);
            }
            return;
        }
        let _region = self.region.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = &*self.shared;
        let erased: *const (dyn Fn(Range<usize>) + Sync) = &run;
        // SAFETY: only the lifetime changes; this function returns after all workers have left the region.
        let erased = unsafe {
            std::mem::transmute::<*const (dyn Fn(Range<usize>) + Sync), *const (dyn Fn(Range<usize>) + Sync + 'static)>(
                erased,
            )
        };
        let job = Job { run: erased, items, grain };
        *shared.job.lock().unwrap_or_else(PoisonError::into_inner) = Some(job);
        shared.next.store(0, Ordering::Relaxed);
        shared.inside.store(self.workers.len(), Ordering::Relaxed);
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        if *shared.sleepers.lock().unwrap_or_else(PoisonError::into_inner) > 0 {
            shared.wake.notify_all();
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| claim(shared, job)));
        let mut spins = 0u32;
        while shared.inside.load(Ordering::Acquire) > 0 {
            spins += 1;
            // A worker without a core of its own needs this one's.
            if spins.is_multiple_of(1024) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
        if let Err(panic) = outcome {
            resume_unwind(panic);
        }
        assert!(!shared.panicked.swap(false, Ordering::Relaxed), "a kernel panicked on another thread");
    }

    /// [`Self::run`] item by item, with a grain that balances the threads.
    pub fn each(&self, items: usize, run: impl Fn(usize) + Sync) {
        self.run(items, items.div_ceil(self.threads() * 8), |range| range.for_each(&run));
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(self.shared.sleepers.lock());
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches panics of items, so joining it cannot fail.
            let _ = worker.join();
        }
    }
}

fn claim(shared: &Shared, job: Job) {
    // SAFETY: `Pool::run` keeps the closure alive while any thread is inside the region.
    let run = unsafe { &*job.run };
    loop {
        let start = shared.next.fetch_add(job.grain, Ordering::Relaxed);
        if start >= job.items {
            return;
        }
        run(start..job.items.min(start + job.grain));
    }
}

fn work(shared: &Shared) {
    let mut seen = 0;
    loop {
        let mut spins = 0;
        loop {
            if shared.stop.load(Ordering::Relaxed) {
                return;
            }
            if shared.epoch.load(Ordering::Acquire) != seen {
                break;
            }
            if spins < SPINS {
                spins += 1;
                std::hint::spin_loop();
                continue;
            }
            let mut sleepers = shared.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
            *sleepers += 1;
            while shared.epoch.load(Ordering::SeqCst) == seen && !shared.stop.load(Ordering::SeqCst) {
                sleepers = shared.wake.wait(sleepers).unwrap_or_else(PoisonError::into_inner);
            }
            *sleepers -= 1;
        }
        // A region ends only after every worker has left it, so the number grows by one at a time.
        seen += 1;
        let job = *shared.job.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(job) = job
            && catch_unwind(AssertUnwindSafe(|| claim(shared, job))).is_err()
        {
            shared.panicked.store(true, Ordering::Relaxed);
        }
        shared.inside.fetch_sub(1, Ordering::Release);
    }
}

/// A slice that the items of one region write in disjoint parts.
pub struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    _slice: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: the parts handed out are disjoint by the contract of `part`, so threads never share an element.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    /// Takes the slice for the length of a region.
    pub fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), _slice: std::marker::PhantomData }
    }

    /// One part.
    ///
    /// # Safety
    /// While the part lives, no other part that overlaps it may exist.
    ///
    /// # Panics
    /// When the range is outside the slice.
    #[inline]
    #[allow(clippy::mut_from_ref, reason = "the point of the type: parts are disjoint by contract")]
    pub unsafe fn part(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} is outside 0..{}", self.len);
        // SAFETY: in bounds by the assertion, exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_runs_once_on_any_number_of_threads() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads).unwrap();
            for items in [0, 1, 7, 1000] {
                for grain in [0, 1, 3, 2000] {
                    let mut hits = vec![0u8; items];
                    let parts = Disjoint::new(&mut hits);
                    // SAFETY: ranges of one region are disjoint.
                    pool.run(items, grain, |range| unsafe { parts.part(range) }.iter_mut().for_each(|hit| *hit += 1));
                    assert!(hits.iter().all(|&hit| hit == 1));
                }
            }
        }
    }

    #[test]
    fn a_panic_in_an_item_reaches_the_caller_and_leaves_the_pool_usable() {
        let pool = Pool::new(3).unwrap();
        for round in 0..20 {
            let bad = catch_unwind(AssertUnwindSafe(|| pool.run(50, 1, |range| assert!(range.start != round))));
            assert!(bad.is_err());
            let count = AtomicUsize::new(0);
            pool.run(50, 1, |_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), 50);
        }
    }
}
