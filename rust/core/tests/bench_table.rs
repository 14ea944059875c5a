//! The table that `cargo bench` prints, from files as criterion saves them.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

// Of `grainmill-benches`, whose own tests would compile criterion.
#[expect(unreachable_pub, reason = "it is public where it is a crate")]
#[path = "../../benches/src/lib.rs"]
mod table;

fn save(path: &Path, value: &Value, at: SystemTime) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, value.to_string()).unwrap();
    File::options().write(true).open(path).unwrap().set_modified(at).unwrap();
}

/// Saves a case that took `ns`, measured `seconds` after the epoch.
fn save_case(dir: &Path, name: &str, throughput: &Value, ns: f64, seconds: u64) {
    let at = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    let id = json!({"full_id": name, "throughput": throughput});
    let mean = json!({"mean": {"point_estimate": ns}, "slope": null});
    save(&dir.join(name).join("new/estimates.json"), &mean, at);
    save(&dir.join(name).join("new/benchmark.json"), &id, at);
}

fn save_change(dir: &Path, name: &str, [low, change, high]: [f64; 3], seconds: u64) {
    let at = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    let interval = json!({"lower_bound": low, "upper_bound": high});
    let mean = json!({"mean": {"point_estimate": change, "confidence_interval": interval}});
    save(&dir.join(name).join("change/estimates.json"), &mean, at);
}

#[test]
fn cases_are_listed_as_they_ran_with_time_throughput_and_change() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let both = json!({"ElementsAndBytes": {"elements": 128, "bytes": 19_267_584}});
    save_case(dir, "batch/copy", &both, 2_400_000.0, 10);
    save_case(dir, "order/shuffled", &json!({"Elements": 4096}), 12_288.0, 20);
    save_case(dir, "records/write", &json!({"Bytes": 20_480_000}), 1.5e9, 30);
    save_case(dir, "records/open", &Value::Null, 812.34, 40);
    save_change(dir, "order/shuffled", [-0.2, -0.123, -0.1], 20);
    save_change(dir, "records/write", [-0.005, 0.02, 0.04], 31);
    save_change(dir, "records/open", [1.0, 2.0, 3.0], 39);

    let printed = table::of_run(dir, &BTreeMap::new(), Duration::from_secs(203)).unwrap();
    assert_eq!(
        printed,
        "
| case           |    time | per element |  GB/s |   change |
| ---            |    ---: |        ---: |  ---: |     ---: |
| batch/copy     | 2.40 ms |     18.8 us |  8.03 |          |
| order/shuffled | 12.3 us |     3.00 ns |       |  -12.3 % |
| records/write  |  1.50 s |             | 0.014 | ~ +2.0 % |
| records/open   |  812 ns |             |       |          |

4 cases measured in 3 min 23 s; changes are against the last run or the baseline, and may be \
noise where marked `~`
"
    );
}

#[test]
fn cases_that_did_not_run_are_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    save_case(dir, "order/first", &Value::Null, 1.0, 10);
    save_case(dir, "order/second", &Value::Null, 1.0, 11);
    let before = table::saved(dir);
    assert_eq!(table::of_run(dir, &before, Duration::ZERO).unwrap(), "");
    assert_eq!(table::of_run(&dir.join("none"), &before, Duration::ZERO).unwrap(), "");

    save_case(dir, "order/second", &Value::Null, 2.0, 20);
    let printed = table::of_run(dir, &before, Duration::ZERO).unwrap();
    assert!(printed.contains("\n1 case measured in 0 min 0 s;"), "{printed}");
    assert!(printed.contains("order/second") && !printed.contains("order/first"), "{printed}");
}
