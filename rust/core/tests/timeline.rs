//! What is kept of a timeline of the engine. A program of its own: what other tests read would be on it.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use grainmill_core::io::LocalFiles;
use grainmill_core::io::storage::Storage;
use grainmill_core::timeline::{Activity, Event, add, add_request, begin, drain, end, take};

/// More than what is left out.
const LONG: Duration = Duration::from_millis(1);

fn offsets(events: impl IntoIterator<Item = Event>) -> Vec<u64> {
    events.into_iter().map(|event| event.range.start).collect()
}

#[test]
fn events_are_kept_while_a_timeline_is_taken_and_short_ones_once_they_add_up() {
    let path = Path::new("file");
    let long_ago = || Instant::now().checked_sub(LONG);
    let decode = |began, at| add(began, Activity::Decode, path, at..at + 1);
    assert_eq!(begin(), None);
    take(3);
    add_request(begin(), path, 1..2);
    decode(long_ago(), 2);
    decode(None, 3);
    let (events, num_dropped) = drain();
    assert_eq!((events[0].activity, &events[0].thread), (Activity::Read, &None));
    assert_eq!((events[1].activity, events[1].path.as_path()), (Activity::Decode, path));
    assert_eq!(
        events[1].thread.is_some(),
        cfg!(all(target_os = "linux", not(feature = "portable")))
    );
    assert!(events[1].time.end - events[1].time.start >= LONG);
    assert_eq!((offsets(events), num_dropped), (vec![1, 2], 0));

    let (mut num_short, mut kept) = (0, 0);
    while kept == 0 {
        decode(begin(), 4);
        num_short += 1;
        kept = drain().0.len();
    }
    assert!(num_short > 1, "one that took nothing was kept");
    for at in 0..5 {
        decode(long_ago(), at);
    }
    let (events, num_dropped) = drain();
    assert_eq!((offsets(events), num_dropped), (vec![2, 3, 4], 2));

    // Reads of local files are on it once they add up, too.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("read");
    std::fs::write(&path, [7; 100]).unwrap();
    let (_, bytes) = LocalFiles.open(&path).unwrap();
    let read = loop {
        bytes.read_at(&mut [0; 10], 20).unwrap();
        if let Some(event) = drain().0.pop_front() {
            break event;
        }
    };
    assert_eq!((read.activity, read.path, read.range), (Activity::Read, path, 20..30));
    let reader = thread::Builder::new().name("a-reader".to_owned());
    let decode = move || add(long_ago(), Activity::Decode, Path::new(""), 0..1);
    reader.spawn(decode).unwrap().join().unwrap();
    let name = drain().0.pop_front().unwrap().thread.and_then(|(_, name)| name);
    assert!(name.is_none_or(|name| name == "a-reader"));

    end();
    assert_eq!(begin(), None);
    add(long_ago(), Activity::Decode, Path::new(""), 0..1);
    assert!(drain().0.is_empty(), "it has ended");
}
