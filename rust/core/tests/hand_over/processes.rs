//! Slots and reservations shared by two processes: each test starts itself as a child process.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command};

use grainmill_core::batch::SharedBudget;

use crate::messages::{self, Message};

/// The environment variable by which a child process finds what it shares with its parent.
const SHARED: &str = "GRAINMILL_TEST_SHARED";

fn shared() -> Option<String> {
    std::env::var(SHARED).ok()
}

/// Starts the test `name` in a child process.
fn start_child(name: &str, shared: &str) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name]).env(SHARED, shared).spawn().unwrap()
}

/// The path by which other processes open `file` of this one.
fn path_of(file: &impl AsRawFd) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd())
}

/// Reserves and releases repeatedly, as process `number` of those that share this budget.
pub(crate) fn reserve_repeatedly(shared_budget: &SharedBudget, number: usize) {
    for round in 1..=2_000 {
        let byte_len = 100 + round * 37 % 400;
        if shared_budget.reserve(byte_len, round % 100) {
            assert!(shared_budget.reserved() <= 1_000);
            shared_budget.release(byte_len).unwrap();
        }
        shared_budget.set_progress(number, round).unwrap();
    }
}

#[test]
fn reservations_of_two_processes_share_one_limit() {
    let open = |path: &str| {
        let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
        SharedBudget::open(file.as_fd(), 4, 1_000).unwrap()
    };
    if let Some(path) = shared() {
        let shared_budget = open(&path);
        std::thread::scope(|scope| {
            scope.spawn(|| reserve_repeatedly(&shared_budget, 2));
            scope.spawn(|| reserve_repeatedly(&shared_budget, 3));
        });
        return;
    }
    let (shared_budget, file) = SharedBudget::create(4, 1_000).unwrap();
    let name = "processes::reservations_of_two_processes_share_one_limit";
    let mut other = start_child(name, &path_of(&file));
    std::thread::scope(|scope| {
        scope.spawn(|| reserve_repeatedly(&shared_budget, 0));
        scope.spawn(|| reserve_repeatedly(&shared_budget, 1));
    });
    assert!(other.wait().unwrap().success());
    assert_eq!(shared_budget.reserved(), 0);
    assert!((0..4).all(|number| shared_budget.progress(number).unwrap() == 2_000));
}

const NUM_SLOTS: usize = 1_000;

#[test]
fn slots_of_another_process_never_change_under_their_users() {
    if let Some(path) = shared() {
        produce_for(UnixStream::connect(path).unwrap());
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let name = "processes::slots_of_another_process_never_change_under_their_users";
    let mut producer = start_child(name, path.to_str().unwrap());
    let (mut tasks, _) = listener.accept().unwrap();
    let mut results = BufReader::new(tasks.try_clone().unwrap()).lines();
    messages::consume(
        NUM_SLOTS,
        |remote_slots| {
            let line = results.next().unwrap().unwrap();
            let mut words = line.split(' ');
            let [slot, mark, byte_len] = [(); 3].map(|()| words.next().unwrap().parse().unwrap());
            let file = words.next().unwrap();
            if !file.is_empty() {
                let file = std::fs::File::options().read(true).write(true).open(file).unwrap();
                remote_slots.add(slot, file.as_fd(), usize::try_from(byte_len).unwrap()).unwrap();
            }
            let freed = words.map(|word| word.parse().unwrap()).collect();
            Message { slot, mark: u8::try_from(mark).unwrap(), freed }
        },
        |returned| {
            let line: Vec<_> = returned.iter().map(ToString::to_string).collect();
            // The producer may exit before the last of them.
            let _ = tasks.write_all((line.join(" ") + "\n").as_bytes());
        },
    );
    assert!(producer.wait().unwrap().success());
}

/// The child process: fills slots and sends a line for each.
fn produce_for(mut results: UnixStream) {
    let mut tasks = BufReader::new(results.try_clone().unwrap()).lines();
    let mut files = Vec::new();
    messages::produce(
        NUM_SLOTS,
        || {
            let line = tasks.next().unwrap().unwrap();
            line.split_terminator(' ').map(|word| word.parse().unwrap()).collect()
        },
        |slot, mark, freed| {
            let file = slot.take_file();
            let path = file.as_ref().map(|(file, _)| path_of(file)).unwrap_or_default();
            let byte_len = file.as_ref().map_or(0, |(_, byte_len)| *byte_len);
            files.extend(file);
            let mut line = format!("{} {mark} {byte_len} {path}", slot.shared_id().unwrap());
            for slot in freed {
                line = line + " " + &slot.to_string();
            }
            results.write_all((line + "\n").as_bytes()).unwrap();
        },
    );
}
