//! Tells the module which profile it is compiled with: cargo names only the one that is inherited from.

use std::path::PathBuf;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // <target directory>/<profile>/build/<package>/out
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
    let profile = out.ancestors().nth(3).and_then(|path| path.file_name());
    let profile = match profile.and_then(|name| name.to_str()).expect("cargo names the profile") {
        "debug" => "dev",
        other => other,
    };
    println!("cargo::rustc-env=GRAINMILL_PROFILE={profile}");
}
