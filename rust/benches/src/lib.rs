//! The results of one run as a table, from the files that criterion saves for each case.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use std::{fs, io};

use serde_json::Value;

/// A change whose interval of 95 % confidence is not beyond this may be noise, as for criterion.
const NOISE: f64 = 0.01;
const HEADER: [&str; 5] = ["case", "time", "per element", "GB/s", "change"];

/// The directories of cases with results, and when these were saved.
pub fn saved(dir: &Path) -> BTreeMap<PathBuf, SystemTime> {
    let mut found = BTreeMap::new();
    let mut unseen = vec![dir.to_owned()];
    while let Some(dir) = unseen.pop() {
        if let Ok(at) = modified(&dir.join("new/benchmark.json")) {
            found.insert(dir, at);
        } else if let Ok(entries) = fs::read_dir(&dir) {
            unseen.extend(entries.flatten().map(|entry| entry.path()));
        }
    }
    found
}

/// The table of the cases saved since `before`, in the order in which they ran; empty if none was.
///
/// # Errors
///
/// A file of a case cannot be read, or has no such results.
pub fn of_run(
    dir: &Path,
    before: &BTreeMap<PathBuf, SystemTime>,
    elapsed: Duration,
) -> io::Result<String> {
    let mut cases: Vec<_> =
        saved(dir).into_iter().filter(|(case, at)| before.get(case) != Some(at)).collect();
    cases.sort_by(|(case, at), (other, other_at)| (at, case).cmp(&(other_at, other)));
    if cases.is_empty() {
        return Ok(String::new());
    }
    let rows = cases.iter().map(|(case, _)| row(case)).collect::<io::Result<Vec<_>>>()?;
    let seconds = elapsed.as_secs();
    Ok(format!(
        "\n{}\n{} measured in {} min {} s; changes are against the last run or the baseline, and may be \
         noise where marked `~`\n",
        text(&rows),
        if rows.len() == 1 { "1 case".to_owned() } else { format!("{} cases", rows.len()) },
        seconds / 60,
        seconds % 60,
    ))
}

/// What the table says of the case whose results are in the directory `case`.
fn row(case: &Path) -> io::Result<[String; 5]> {
    let id = json(&case.join("new/benchmark.json"))?;
    let estimates = json(&case.join("new/estimates.json"))?;
    let time_ns = ["slope", "mean"]
        .into_iter()
        .find_map(|estimate| estimates[estimate]["point_estimate"].as_f64())
        .ok_or_else(|| io::Error::other(format!("{}: no estimate of a time", case.display())))?;
    let (elements, bytes) = match &id["throughput"] {
        both if both["ElementsAndBytes"].is_object() => {
            let both = &both["ElementsAndBytes"];
            (both["elements"].as_f64(), both["bytes"].as_f64())
        }
        one => (one["Elements"].as_f64(), one["Bytes"].as_f64()),
    };
    Ok([
        id["full_id"].as_str().unwrap_or("?").to_owned(),
        duration(time_ns),
        elements.map(|elements| duration(time_ns / elements)).unwrap_or_default(),
        bytes.map(|bytes| short(bytes / time_ns)).unwrap_or_default(),
        change(case)?,
    ])
}

/// Empty if this run was compared with none: what an earlier one was compared with stays there.
fn change(case: &Path) -> io::Result<String> {
    let path = case.join("change/estimates.json");
    let run = modified(&case.join("new/estimates.json"))?;
    if modified(&path).map_or(true, |compared| compared < run) {
        return Ok(String::new());
    }
    let mean = &json(&path)?["mean"];
    let interval = &mean["confidence_interval"];
    let (Some(low), Some(change), Some(high)) = (
        interval["lower_bound"].as_f64(),
        mean["point_estimate"].as_f64(),
        interval["upper_bound"].as_f64(),
    ) else {
        return Ok(String::new());
    };
    let sure = low > NOISE || high < -NOISE;
    Ok(format!("{}{:+.1} %", if sure { "" } else { "~ " }, change * 100.0))
}

fn modified(path: &Path) -> io::Result<SystemTime> {
    fs::metadata(path)?.modified()
}

fn json(path: &Path) -> io::Result<Value> {
    Ok(serde_json::from_slice(&fs::read(path)?)?)
}

fn duration(ns: f64) -> String {
    match ns {
        ..1e3 => format!("{} ns", short(ns)),
        ..1e6 => format!("{} us", short(ns / 1e3)),
        ..1e9 => format!("{} ms", short(ns / 1e6)),
        _ => format!("{} s", short(ns / 1e9)),
    }
}

/// About three digits.
fn short(number: f64) -> String {
    let decimals = match number {
        ..1.0 => 3,
        ..10.0 => 2,
        ..100.0 => 1,
        _ => 0,
    };
    format!("{number:.decimals$}")
}

/// Markdown that is aligned in a terminal as well.
fn text(rows: &[[String; 5]]) -> String {
    let width = |column: usize| {
        rows.iter().map(|row| row[column].len()).fold(HEADER[column].len(), usize::max)
    };
    let widths: [usize; 5] = std::array::from_fn(width);
    let mut out = String::new();
    let mut line = |cells: [&str; 5]| {
        let [case, numbers @ ..] = cells;
        let _ = write!(out, "| {case:<0$} |", widths[0]);
        for (number, width) in numbers.into_iter().zip(&widths[1..]) {
            let _ = write!(out, " {number:>width$} |");
        }
        out.push('\n');
    };
    line(HEADER);
    line(["---", "---:", "---:", "---:", "---:"]);
    for row in rows {
        line(row.each_ref().map(String::as_str));
    }
    out
}
