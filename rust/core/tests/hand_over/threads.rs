//! Stress tests of the arena, remote slots and readers with many threads.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::channel;

use grainmill_core::batch::SharedBudget;
use grainmill_core::batch::{Arena, Slot, copy_rows};
use grainmill_core::formats::ArrayRecord;
use grainmill_core::formats::array_record::RecordWriter;
use grainmill_core::io::ReadQueue;
use grainmill_core::read::{self, Files, SourceFile};

use crate::messages::{self, Message};

#[test]
fn remote_slots_never_change_under_their_users() {
    const NUM_SLOTS: usize = 2_000;
    let (task_sender, tasks) = channel();
    let (send, results) = channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let tasks = tasks;
            let send = send;
            messages::produce(
                NUM_SLOTS,
                || tasks.recv().unwrap(),
                |slot, mark, freed| {
                    let message = Message { slot: slot.shared_id().unwrap(), mark, freed };
                    send.send((message, slot.take_file())).unwrap();
                },
            );
        });
        messages::consume(
            NUM_SLOTS,
            move |remote_slots| {
                let (message, file) = results.recv().unwrap();
                if let Some((file, byte_len)) = file {
                    remote_slots.add(message.slot, file.as_fd(), byte_len).unwrap();
                }
                message
            },
            // The producer may end before the last of them.
            move |returned| drop(task_sender.send(returned)),
        );
    });
}

#[test]
fn slots_return_to_their_arena_from_any_thread() {
    // A small arena, so that some returned slots are retained and others freed.
    let arena = Arena::with_poison(40_000, true);
    std::thread::scope(|scope| {
        for producer in 0..3_u8 {
            let users: Vec<_> = (0..2)
                .map(|user| {
                    let (sender, receiver) = channel::<(Arc<Slot>, u8)>();
                    scope.spawn(move || {
                        let mut held = VecDeque::new();
                        for slot in receiver {
                            held.push_back(slot);
                            if held.len() > 2 + user
                                && let Some((slot, mark)) = held.pop_front()
                            {
                                assert!(slot.bytes().iter().all(|&byte| byte == mark));
                            }
                        }
                    });
                    sender
                })
                .collect();
            let arena = &arena;
            scope.spawn(move || {
                for round in 0..700_u16 {
                    let mut slot = arena.slot(600 + usize::from(round % 5) * 900).unwrap();
                    let mark = producer * 50 + u8::try_from(round % 50).unwrap();
                    slot.bytes_mut().fill(mark);
                    let slot = Arc::new(slot);
                    for user in &users {
                        user.send((Arc::clone(&slot), mark)).unwrap();
                    }
                }
            });
        }
    });
    assert_eq!(arena.free_bytes(), arena.total_bytes());
    assert!(arena.free_bytes() <= 40_000);
}

#[test]
fn rows_copied_concurrently_are_in_their_slots() {
    const ROW_LEN: usize = 50_000;
    let arena = Arena::with_poison(1 << 20, true);
    std::thread::scope(|scope| {
        for thread in 0..3_u8 {
            let arena = &arena;
            let (sender, receiver) = channel::<(Slot, u8)>();
            scope.spawn(move || {
                for (slot, first) in receiver {
                    for (row, bytes) in slot.bytes().chunks_exact(ROW_LEN).enumerate() {
                        let mark = first + u8::try_from(row).unwrap();
                        assert!(bytes.iter().all(|&byte| byte == mark));
                    }
                }
            });
            scope.spawn(move || {
                for round in 0..12_u8 {
                    let first = thread * 80 + round;
                    let rows: Vec<_> = (0..8).map(|row| vec![first + row; ROW_LEN]).collect();
                    let rows: Vec<_> = rows.iter().map(|row| row.as_slice().into()).collect();
                    let mut slot = arena.slot(rows.len() * ROW_LEN).unwrap();
                    copy_rows(&rows, ROW_LEN, slot.bytes_mut());
                    sender.send((slot, first)).unwrap();
                }
            });
        }
    });
}

#[test]
fn reservations_through_several_mappings_share_one_limit() {
    let (shared_budget, file) = SharedBudget::create(4, 1_000).unwrap();
    std::thread::scope(|scope| {
        for number in 0..4 {
            let shared_budget = SharedBudget::open(file.as_fd(), 4, 1_000).unwrap();
            scope.spawn(move || crate::processes::reserve_repeatedly(&shared_budget, number));
        }
        for _ in 0..1_000 {
            assert!(shared_budget.reserved() <= 1_000);
        }
    });
    assert_eq!(shared_budget.reserved(), 0);
    assert!((0..4).all(|number| shared_budget.progress(number).unwrap() == 2_000));
}

#[test]
fn records_prefetched_by_threads_are_in_their_slots() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("records.array_record");
    let record = |number: u64| vec![u8::try_from(number % 251).unwrap(); 10_000];
    let mut writer = RecordWriter::create(&path, "uncompressed".parse().unwrap()).unwrap();
    (0..500).for_each(|number| writer.write(&record(number)).unwrap());
    writer.close().unwrap();
    let files = Arc::new(Files::open(ArrayRecord, [SourceFile::from(path)]).unwrap());
    let positions: Vec<u64> = (0..500).map(|at| at * 7 % 500).collect();
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (files, positions) = (&files, &positions);
            scope.spawn(move || {
                for round in 0..6 {
                    let plan = files.plan(positions).unwrap();
                    assert!(plan.is_large());
                    let mut memory = vec![0; positions.len() * 10_000];
                    let slots = crate::bytes::borrowed(&mut memory, 10_000);
                    let pending = read::start(plan, slots, ReadQueue::of_program());
                    if (round + thread) % 3 == 0 {
                        pending.abandon(|| ());
                        while pending.is_running() {
                            std::thread::yield_now();
                        }
                        let again = pending.finish().unwrap();
                        let expected = positions.iter().map(|&position| record(position));
                        assert!(again.iter_unslotted().map(Option::unwrap).eq(expected));
                        continue;
                    }
                    let found = pending.finish().unwrap();
                    assert!(!pending.is_running(), "nothing writes into the memory any more");
                    assert!(found.iter_unslotted().all(|record| record.is_none()));
                    for (&position, found) in positions.iter().zip(memory.chunks_exact(10_000)) {
                        assert_eq!(found, record(position));
                    }
                }
            });
        }
    });
}
