//! `kvern pull`: fetches a model into the cache.

use kvern::{Cache, Error, builtins};
use serde_json::json;

use crate::cli::RunArgs;
use crate::output::{busy, print, print_json};

pub fn run(name: &str, run: &RunArgs) -> Result<(), Error> {
    let Some(model) = builtins().iter().find(|model| model.name == name) else {
        let known = builtins().iter().map(|model| model.name).collect();
        return Err(Error::NoModel { name: name.into(), known, hint: "Only these can be fetched." });
    };
    let cache = Cache::from_env();
    let path = busy(format!("fetching {} ({})", model.name, model.description), || cache.fetch(model))?;
    if run.json {
        return print_json(&json!({ "name": model.name, "path": path }));
    }
    print(&format!("{}\n", path.display()))
}
