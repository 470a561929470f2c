//! Tells rustc what to link. Features decide, the first of `stub`, `vendored` and `pkg-config` that is on; with none of them the
//! linker looks for the library in its own folders.
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{exit, Command};

const VERSION: &str = env!("CARGO_PKG_VERSION");

fn has(feature: &str) -> bool {
    env::var_os(format!("CARGO_FEATURE_{}", feature)).is_some()
}

fn fail(message: &str) -> ! {
    eprintln!("turboattention-sys: {}", message);
    exit(1)
}

fn run(command: &mut Command) -> Result<String, String> {
    match command.output() {
        Err(e) => Err(format!("cannot run {:?}: {}", command.get_program(), e)),
        Ok(output) if output.status.success() => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        Ok(output) => Err(format!(
            "{:?} failed\n{}{}",
            command,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        )),
    }
}

fn pkg_config(path: Option<&Path>) {
    for variable in ["PKG_CONFIG", "PKG_CONFIG_PATH", "PKG_CONFIG_LIBDIR", "PKG_CONFIG_SYSROOT_DIR"] {
        println!("cargo:rerun-if-env-changed={}", variable);
    }
    let mut command = Command::new(env::var_os("PKG_CONFIG").unwrap_or_else(|| "pkg-config".into()));
    if let Some(path) = path {
        command.env("PKG_CONFIG_PATH", path);
    }
    if has("STATIC") {
        command.arg("--static");
    }
    command.args(["--libs", "--cflags", &format!("turboattention >= {}", VERSION)]);
    let flags = run(&mut command).unwrap_or_else(|e| {
        fail(&format!(
            "{}\nInstall TurboAttention {} or newer, and have PKG_CONFIG_PATH name the folder of turboattention.pc; or use the \
             feature `vendored`, which builds the library, or `stub`, which needs it at run time alone.",
            e, VERSION
        ))
    });
    for flag in flags.split_whitespace() {
        if let Some(folder) = flag.strip_prefix("-L") {
            println!("cargo:rustc-link-search=native={}", folder);
        } else if flag == "-lturboattention" && has("STATIC") {
            println!("cargo:rustc-link-lib=static=turboattention");
        } else if let Some(library) = flag.strip_prefix("-l") {
            println!("cargo:rustc-link-lib={}", library);
        } else if flag == "-pthread" {
            println!("cargo:rustc-link-lib=pthread");
        } else if let Some(folder) = flag.strip_prefix("-I") {
            println!("cargo:include={}", folder);
        }
    }
}

/// Builds the library in OUT_DIR and links it as its own turboattention.pc says.
fn vendored() {
    println!("cargo:rerun-if-env-changed=TURBOATTENTION_SOURCE");
    let source = match env::var_os("TURBOATTENTION_SOURCE") {
        Some(folder) => PathBuf::from(folder),
        None => Path::new(&env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("../../.."),
    };
    if !source.join("include/turboattention.h").is_file() {
        fail(&format!("no sources of TurboAttention in {}: set TURBOATTENTION_SOURCE to a checkout", source.display()));
    }
    let source = fs::canonicalize(&source).unwrap_or(source);
    for folder in ["CMakeLists.txt", "cmake", "include", "kernels", "src", "stores", "third_party", "tiering"] {
        println!("cargo:rerun-if-changed={}", source.join(folder).display());
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap());
    let (build, prefix) = (out.join("build"), out.join("prefix"));
    let cache = fs::read_to_string(build.join("CMakeCache.txt")).unwrap_or_default();
    if !cache.contains(&format!("CMAKE_HOME_DIRECTORY:INTERNAL={}\n", source.display())) {
        let _ = fs::remove_dir_all(&build); // of other sources, which cmake refuses
    }
    let mut configure = Command::new("cmake");
    configure
        .args(["-DCMAKE_BUILD_TYPE=Release", "-DTA_BUILD_TESTS=OFF", "-DTA_BUILD_BENCH=OFF", "-DTA_BUILD_EXAMPLES=OFF"])
        .args(["-DTA_BUILD_TOOLS=OFF", "-DTA_BUILD_SHARED=OFF", "-DCMAKE_INSTALL_LIBDIR=lib"])
        .arg(format!("-DTA_ENABLE_CUDA={}", if has("CUDA") { "ON" } else { "OFF" }))
        .arg(format!("-DCMAKE_INSTALL_PREFIX={}", prefix.display()))
        .arg("-S")
        .arg(&source)
        .arg("-B")
        .arg(&build);
    let mut install = Command::new("cmake");
    let jobs = env::var("NUM_JOBS").unwrap_or_else(|_| "1".into());
    install.arg("--build").arg(&build).args(["--target", "install", "--parallel", &jobs]);
    for step in [&mut configure, &mut install] {
        run(step).unwrap_or_else(|e| fail(&e));
    }
    pkg_config(Some(&prefix.join("lib/pkgconfig")));
}

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if env::var_os("DOCS_RS").is_some() && !has("STUB") {
        return; // documentation links nothing
    }
    if has("STUB") {
        println!("cargo:rustc-link-lib=dl");
    } else if has("VENDORED") {
        vendored();
    } else if has("PKG_CONFIG") {
        pkg_config(None);
    } else {
        println!("cargo:rustc-link-lib={}turboattention", if has("STATIC") { "static=" } else { "" });
    }
}
