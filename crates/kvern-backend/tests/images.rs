//! Images of rows with groups of every kind: between backends, through files, and out of damaged ones.

mod common;
#[path = "../../../tests/support/subjects.rs"]
mod subjects;

use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use common::{Noise, groups, spec, store};
use kvern_backend::{Backend, Error as BackendError, Reference, freeze, thaw};
use kvern_state::{Batch, Codec, GroupSpec, Identity, Image, ImageError, Pool, Row, StateSpec};
use kvern_weights::Mapping;
use subjects::{on, sets};

static REFERENCE: LazyLock<Reference> = LazyLock::new(Reference::new);

fn identity() -> Identity {
    Identity { model: "m".into(), adapter: "a".into(), policy: spec().policy(), salt: "s".into() }
}

/// A backend with storage and a batch of one row.
struct Life<'a, B: Backend> {
    backend: &'a B,
    pool: Pool,
    pages: B::Pages,
    batch: Batch,
    tokens: Vec<u32>,
}

impl<'a, B: Backend> Life<'a, B> {
    fn new(backend: &'a B) -> Self {
        let pool = Pool::new(spec(), 1 << 24);
        let pages = backend.pages(pool.spec()).unwrap();
        let mut life = Self { batch: Batch::new(&pool), backend, pool, pages, tokens: Vec::new() };
        life.admit(life.pool.row(), Vec::new());
        life
    }

    fn admit(&mut self, row: Row, tokens: Vec<u32>) {
        self.batch.clear();
        self.batch.prepare_admit(vec![(row, 300)]).unwrap().commit();
        self.tokens = tokens;
    }

    /// Appends tokens, whose columns and states follow from them alone, in steps of at most `chunk`.
    fn grow(&mut self, count: usize, chunk: usize) {
        let end = self.tokens.len() + count;
        while self.tokens.len() < end {
            let count = chunk.min(end - self.tokens.len()).min(self.batch.rows()[0].room());
            let start = self.tokens.len() as u32;
            let tokens: Vec<u32> = (start..start + count as u32).map(|i| i * 31 % 1000).collect();
            let append = self.batch.prepare_append(&[count]).unwrap();
            store(self.backend, &mut self.pages, &self.pool, &append, &tokens);
            append.commit();
            self.tokens.extend(tokens);
        }
    }

    fn image(&self) -> Image {
        freeze(self.backend, &self.pages, &self.batch.rows()[0], identity(), &self.tokens).unwrap()
    }

    fn thaw(&mut self, image: &Image) -> Result<Row, BackendError> {
        thaw(self.backend, &mut self.pages, &self.pool, image, &identity())
    }
}

fn saved(image: &Image, directory: &Path) -> Image {
    let path = directory.join("row.kvern");
    image.save(&path).unwrap();
    Image::load(&path).unwrap()
}

/// Save, another process, restore, continue: at every kind of length, on every backend, from every other.
#[test]
fn a_restored_row_goes_on_as_if_it_had_never_stopped() {
    fn check<A: Backend, B: Backend>(from: &A, to: &B, directory: &Path) {
        let mut whole = Life::new(from);
        let mut to = Life::new(to);
        // Shorter than a page, on borders of pages, before, at and after the change of encoding, inside the window and past it.
        for (count, chunk) in [(1, 1), (14, 7), (1, 1), (21, 5), (13, 64), (1, 1), (40, 16), (100, 64)] {
            whole.grow(count, chunk);
            let image = saved(&whole.image(), directory);
            assert_eq!(image.state_hash(), whole.image().state_hash());
            // An image stays valid and may be restored again, whatever became of the first row.
            for again in 0..2 {
                let row = to.thaw(&image).unwrap();
                to.admit(row, image.tokens().to_vec());
                assert_eq!(to.image().state_hash(), image.state_hash());
                to.grow(50 + again, 9);
            }
            let mut on = Life::new(&*REFERENCE);
            on.grow(to.tokens.len(), 300);
            assert_eq!(to.image().state_hash(), on.image().state_hash(), "restored at {}", image.tokens().len());
        }
        drop(to.batch);
        assert_eq!((to.pool.usage().used, to.pool.usage().promised), (0, 0));
    }
    let directory = tempfile::tempdir().unwrap();
    for set in sets() {
        on!(set, 2, false, |backend| check(backend, backend, directory.path()));
        on!(set, 3, false, |backend| check(&*REFERENCE, backend, directory.path()));
        on!(set, 1, false, |backend| check(backend, &*REFERENCE, directory.path()));
    }
}

#[test]
fn an_empty_row_is_saved_and_restored_as_one() {
    let directory = tempfile::tempdir().unwrap();
    let mut life = Life::new(&*REFERENCE);
    let image = saved(&life.image(), directory.path());
    assert_eq!((image.tokens().len(), image.bytes()), (0, 0));
    let row = life.thaw(&image).unwrap();
    assert!(row.is_empty());
    life.admit(row, Vec::new());
    life.grow(30, 7);
    let mut plain = Life::new(&*REFERENCE);
    plain.grow(30, 30);
    assert_eq!(life.image().state_hash(), plain.image().state_hash());
}

/// Every single-bit flip and truncation is found, and touches nothing.
#[test]
fn a_damaged_file_is_an_error_and_the_running_row_does_not_notice() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("row.kvern");
    let mut life = Life::new(&*REFERENCE);
    life.grow(70, 16);
    life.image().save(&path).unwrap();
    let (good, before, usage) = (fs::read(&path).unwrap(), life.image().state_hash(), life.pool.usage());
    let mut noise = Noise(7);
    for i in 0..1200 {
        let mut bytes = good.clone();
        if i % 6 == 0 {
            bytes.truncate(noise.bits() as usize % good.len());
        } else {
            // Headers are short and of many kinds of bytes; every second flip goes there.
            let among = if i % 2 == 0 { good.len() } else { 4096.min(good.len()) };
            bytes[noise.bits() as usize % among] ^= 1 << (noise.bits() % 8);
        }
        let error = match Image::parse(&Mapping::from_bytes(&path, bytes)) {
            Err(error) => error,
            Ok(_) => panic!("case {i} was accepted"),
        };
        assert!(matches!(error, ImageError::Damaged { .. }), "case {i}: {error}");
    }
    assert_eq!((life.image().state_hash(), life.pool.usage()), (before, usage));
    assert!(Image::parse(&Mapping::from_bytes(&path, good)).is_ok());
}

#[test]
fn state_of_anything_else_is_refused_by_name() {
    let mut life = Life::new(&*REFERENCE);
    life.grow(70, 16);
    let image = life.image();
    let usage = life.pool.usage();
    let refused = |spec: StateSpec, identity: Identity| -> String {
        let pool = Pool::new(spec, 1 << 24);
        let error = image.row(&pool, &identity).map(drop).unwrap_err();
        assert!(matches!(error, ImageError::Mismatch { .. }));
        assert_eq!(pool.usage().used, 0);
        error.to_string()
    };
    for (change, field) in [
        (Identity { model: "other".into(), ..identity() }, "its model is"),
        (Identity { adapter: "other".into(), ..identity() }, "its adapter is"),
        (Identity { salt: "other".into(), ..identity() }, "its salt is"),
        (Identity { policy: "other".into(), ..identity() }, "its state policy is"),
    ] {
        assert!(refused(spec(), change).contains(field));
    }
    let with = |change: &dyn Fn(&mut Vec<GroupSpec>)| {
        let mut groups = groups();
        change(&mut groups);
        StateSpec::new(16, groups).unwrap()
    };
    let cases: [(StateSpec, &str); 9] = [
        (StateSpec::new(32, groups()).unwrap(), "its page size is 16, expected 32"),
        (with(&|groups| drop(groups.pop())), "its number of groups"),
        (with(&|groups| groups.swap(0, 4)), "its kind of group 0"),
        (with(&|groups| groups[0].layers = 3), "its number of layers of group 0"),
        (with(&|groups| groups[1].window = None), "its window of group 1"),
        (with(&|groups| groups[5].lag = Some(2)), "its lag of group 5"),
        (with(&|groups| groups[0].planes[1].codec = Codec::F32), "its layout of group 0"),
        (with(&|groups| groups[0].planes[0].dim = 24), "its layout of group 0"),
        (with(&|groups| groups[2].late.as_mut().unwrap().start = 80), "its encoding of group 2"),
    ];
    for (spec, expected) in cases {
        let error = refused(spec, identity());
        assert!(error.contains(expected), "{error}");
    }
    // Too little memory is another matter, and leaves nothing behind either.
    let small = Pool::new(spec(), spec().row_bytes(70) - 1);
    assert!(matches!(image.row(&small, &identity()), Err(ImageError::State(kvern_state::Error::Budget { .. }))));
    assert_eq!((small.usage().used, life.pool.usage()), (0, usage));
}

/// A whole file, every hash right, whose manifest claims columns that no row can have.
#[test]
fn impossible_sizes_are_damage() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("row.kvern");
    Life::new(&*REFERENCE).image().save(&path).unwrap();
    let bytes = fs::read(&path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let mut metadata = header.metadata().clone().unwrap();
    let mut manifest: kvern_state::Manifest = serde_json::from_str(&metadata["kvern.checkpoint"]).unwrap();
    (manifest.groups[0].columns, manifest.groups[0].start) = (usize::MAX, usize::MAX);
    let manifest = serde_json::to_string(&manifest).unwrap();
    metadata.insert("kvern.hash".into(), format!("{:032x}", xxhash_rust::xxh3::xxh3_128(manifest.as_bytes())));
    metadata.insert("kvern.checkpoint".into(), manifest);
    let bytes = safetensors::serialize(file.tensors(), Some(metadata)).unwrap();
    assert!(matches!(Image::parse(&Mapping::from_bytes(&path, bytes)), Err(ImageError::Damaged { .. })));
}

/// A file of a later version says so, whatever else it holds.
#[test]
fn another_version_is_refused_as_such() {
    let path = Path::new("later.kvern");
    let manifest = r#"{"version":2,"more":"than today"}"#;
    let sum = format!("{:032x}", xxhash_rust::xxh3::xxh3_128(manifest.as_bytes()));
    let metadata = [("kvern.checkpoint".to_string(), manifest.to_string()), ("kvern.hash".to_string(), sum)].into();
    let none: Vec<(String, safetensors::tensor::TensorView<'_>)> = Vec::new();
    let bytes = safetensors::serialize(none, Some(metadata)).unwrap();
    let outcome = Image::parse(&Mapping::from_bytes(path, bytes));
    assert!(matches!(outcome, Err(ImageError::Version { found: 2 })));
}

#[test]
fn a_save_that_fails_leaves_the_older_file_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("row.kvern");
    let mut life = Life::new(&*REFERENCE);
    life.grow(20, 16);
    life.image().save(&path).unwrap();
    let before = fs::read(&path).unwrap();
    // A directory stands where the file should go.
    fs::create_dir(directory.path().join("taken")).unwrap();
    fs::write(directory.path().join("taken/inside"), "x").unwrap();
    assert!(matches!(life.image().save(&directory.path().join("taken")), Err(ImageError::Io { .. })));
    assert!(matches!(life.image().save(&directory.path().join("no/such/place.kvern")), Err(ImageError::Io { .. })));
    assert_eq!(fs::read(&path).unwrap(), before);
    let mut names: Vec<_> = fs::read_dir(directory.path()).unwrap().map(|file| file.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["row.kvern", "taken"], "no partial file stays behind");
    // Readers of the old file, mapped, are not disturbed by a new one of its name.
    let old = Image::load(&path).unwrap();
    life.grow(20, 16);
    life.image().save(&path).unwrap();
    assert_eq!((old.tokens().len(), Image::load(&path).unwrap().tokens().len()), (20, 40));
    assert!(life.thaw(&old).is_ok());
}
