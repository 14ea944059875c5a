//! A model of producers and the consumer of their slots, which advances step by step with the
//! engine's own types.
//!
//! Producers and consumer make the same calls as `grainmill._workers`. A step is one call into the
//! engine, together with what only its caller can see. That covers all schedules: each of these
//! calls accesses shared state under one lock or by one atomic operation. Everything else it does
//! (filling a slot with poison, mapping it, cloning an `Arc`) concerns memory that no other thread
//! can access at that time, and the total bytes of an arena are read and changed only under the
//! lock of its producer.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use grainmill_core::batch::SharedBudget;
use grainmill_core::batch::{Arena, BorrowedSlot, RemoteSlots, Slot};

/// Bytes per slot: one size class, and at most a page.
const SLOT: usize = 512;
const SLOT_BYTES: u64 = SLOT as u64;
const POISON: u8 = 0xA5;
/// The byte that another thread of a producer's process writes into its slots.
const LOCAL_BYTE: u8 = 0xEE;
/// Slots that a producer leaves free in the budget when it reserves.
const NUM_SPARE: u64 = 2;

/// A configuration to explore.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scenario {
    pub(crate) num_producers: usize,
    /// Tasks for each producer, one slot each.
    pub(crate) num_tasks: usize,
    /// The number of users of the consumer that hold each slot.
    pub(crate) num_owners: usize,
    /// How often another thread of each producer's process allocates a slot, which it drops at any
    /// time.
    pub(crate) num_local_slots: usize,
    /// Slots that may be reserved before the consumer takes them.
    pub(crate) budget: u64,
    /// Whether producers free all unused slots before each task.
    pub(crate) frugal: bool,
    pub(crate) fault: Option<Fault>,
}

/// An injected fault that the exploration must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// A slot is reported as returned when the first of its users has dropped it.
    ReturnedWithTheFirstOwner,
    /// The producer reuses its slot as soon as it is sent.
    ReusedOnceSent,
    /// A task is sent without the slots that were returned.
    ReturnsNotSent,
    /// The producer frees slots without reporting it to the consumer.
    FreedNotSent,
    /// A producer computes what it releases from the free bytes, which other threads change, not
    /// from the total bytes.
    CountedByFreeSlots,
    /// A reservation checks and adds in two steps.
    ReservedInTwoSteps,
}

/// A step of one thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Producer `0` makes its next call.
    Producer(usize),
    /// The other thread in the process of producer `0` allocates or drops its slot.
    OtherThread(usize),
    /// The consumer collects the returned slots for a task for producer `0`.
    StartTask(usize),
    /// The consumer receives the next message of producer `0`.
    Receive(usize),
    /// The consumer waits for a result of producer `0`, and grants it the memory it waits for.
    Grant(usize),
    /// The consumer passes the oldest result of producer `0` to its users.
    Take(usize),
    /// The consumer makes the second of two calls.
    Continue,
    /// One user of the borrowed slot with this index drops it.
    Drop(usize),
}

#[derive(Debug)]
enum ToProducer {
    Task(Vec<u64>),
    Granted,
}

#[derive(Debug)]
enum ToConsumer {
    Slot(u64, OwnedFd, usize),
    Filled { slot: u64, mark: u8, freed: Vec<u64> },
    NeedsMemory,
}

/// The state of a producer between two calls.
#[derive(Debug, Default)]
enum State {
    #[default]
    Idle,
    StartTask,
    /// With the free bytes.
    CheckBudget(usize),
    Trim {
        max_free: usize,
        then: AfterTrim,
    },
    /// With the bytes before trimming.
    Trimming {
        max_free: usize,
        before: usize,
        then: AfterTrim,
    },
    Trimmed {
        before: usize,
        then: AfterTrim,
    },
    Allocate,
    Reserve {
        again: bool,
    },
    /// The fault: the check has passed, but nothing is reserved.
    Add,
    Await,
    /// With the reserved bytes.
    Slot(u64),
    ReleaseUnused {
        reserved: u64,
        grown: u64,
        slot: Slot,
    },
    Send(Slot),
}

#[derive(Clone, Copy, Debug)]
enum AfterTrim {
    Allocate,
    ReserveAgain,
}

#[derive(Debug)]
struct Producer {
    number: usize,
    arena: Arena,
    state: State,
    inbox: VecDeque<ToProducer>,
    outbox: VecDeque<ToConsumer>,
    /// Tasks that arrived while it waited for memory.
    tasks: VecDeque<Vec<u64>>,
    sent: BTreeMap<u64, Slot>,
    freed: Vec<u64>,
    num_filled: usize,
    local_slot: Option<Slot>,
    num_local_slots: usize,
    /// The ids of its slots, in the order of allocation.
    names: Vec<u64>,
}

/// A slot that users hold.
#[derive(Debug)]
struct Held {
    producer: usize,
    slot: u64,
    mark: u8,
    owners: Vec<Arc<BorrowedSlot>>,
}

/// The first of two calls of the consumer, with its result.
#[derive(Debug)]
enum FirstCall {
    SendTask(usize, Vec<u64>),
    Take(u64),
}

/// The state of the model between two steps.
#[derive(Debug)]
pub(crate) struct World {
    scenario: Scenario,
    shared_budget: SharedBudget,
    producers: Vec<Producer>,
    remote_slots: Vec<RemoteSlots>,
    num_sent: Vec<usize>,
    num_received: Vec<usize>,
    results: Vec<VecDeque<(u64, u8)>>,
    is_waiting: Vec<bool>,
    first_call: Option<FirstCall>,
    held: Vec<Held>,
    /// Slots that the fault reports as returned.
    returned_early: Vec<Vec<u64>>,
}

impl World {
    pub(crate) fn new(scenario: Scenario) -> Self {
        let count = scenario.num_producers;
        let (shared_budget, _) = SharedBudget::create(count, scenario.budget * SLOT_BYTES).unwrap();
        Self {
            scenario,
            shared_budget,
            producers: (0..count)
                .map(|number| Producer::new(number, scenario.num_local_slots))
                .collect(),
            remote_slots: (0..count).map(|_| RemoteSlots::new(true)).collect(),
            num_sent: vec![0; count],
            num_received: vec![0; count],
            results: vec![VecDeque::new(); count],
            is_waiting: vec![false; count],
            first_call: None,
            held: Vec::new(),
            returned_early: vec![Vec::new(); count],
        }
    }

    /// The possible next steps; none when all is done, or in a deadlock.
    pub(crate) fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        for (number, producer) in self.producers.iter().enumerate() {
            if producer.can_continue() {
                steps.push(Step::Producer(number));
            }
            if producer.local_slot.is_some()
                || (producer.num_local_slots > 0 && producer.is_unlocked())
            {
                steps.push(Step::OtherThread(number));
            }
            if self.first_call.is_some() {
                continue;
            }
            if self.num_sent[number] < self.scenario.num_tasks {
                steps.push(Step::StartTask(number));
            }
            if !producer.outbox.is_empty() {
                steps.push(Step::Receive(number));
            }
            if self.is_waiting[number] {
                steps.push(Step::Grant(number));
            }
            if !self.results[number].is_empty() {
                steps.push(Step::Take(number));
            }
        }
        if self.first_call.is_some() {
            steps.push(Step::Continue);
        }
        let held = self.held.iter().enumerate().filter(|(_, held)| !held.owners.is_empty());
        steps.extend(held.map(|(at, _)| Step::Drop(at)));
        steps
    }

    /// Takes `step`, and then checks the invariants.
    pub(crate) fn take(&mut self, step: Step) -> Result<(), String> {
        match step {
            Step::Producer(number) => {
                self.producers[number].advance(&self.shared_budget, self.scenario)?;
            }
            Step::OtherThread(number) => {
                self.producers[number].advance_other_thread(&self.shared_budget)?;
            }
            Step::StartTask(number) => {
                let (mut returned, _) = self.remote_slots[number].take_returned();
                returned.append(&mut self.returned_early[number]);
                self.num_sent[number] += 1;
                self.first_call = Some(FirstCall::SendTask(number, returned));
            }
            Step::Receive(number) => self.receive(number)?,
            Step::Grant(number) => {
                self.shared_budget.reserve_anyway(SLOT_BYTES);
                self.is_waiting[number] = false;
                self.producers[number].inbox.push_back(ToProducer::Granted);
            }
            Step::Take(number) => {
                let (slot, mark) = self.results[number].pop_front().ok_or("no result")?;
                let borrowed =
                    Arc::new(self.remote_slots[number].borrow(slot).map_err(|e| e.to_string())?);
                self.first_call = Some(FirstCall::Take(borrowed.byte_len() as u64));
                let owners = vec![borrowed; self.scenario.num_owners];
                self.held.push(Held { producer: number, slot, mark, owners });
            }
            Step::Continue => self.make_second_call(),
            Step::Drop(at) => self.drop_user(at),
        }
        self.check()
    }

    fn make_second_call(&mut self) {
        match self.first_call.take() {
            Some(FirstCall::Take(byte_len)) => {
                self.shared_budget.release(byte_len).expect("reserved");
            }
            Some(FirstCall::SendTask(number, mut returned)) => {
                for _ in &returned {
                    self.shared_budget.reserve_anyway(SLOT_BYTES);
                }
                if self.scenario.fault == Some(Fault::ReturnsNotSent) {
                    returned.clear();
                }
                self.producers[number].inbox.push_back(ToProducer::Task(returned));
            }
            None => {}
        }
    }

    fn receive(&mut self, number: usize) -> Result<(), String> {
        match self.producers[number].outbox.pop_front().ok_or("no message")? {
            ToConsumer::Slot(slot, file, byte_len) => {
                let added = self.remote_slots[number].add(slot, file.as_fd(), byte_len);
                added.map_err(|error| error.to_string())?;
            }
            ToConsumer::Filled { slot, mark, freed } => {
                self.num_received[number] += 1;
                self.results[number].push_back((slot, mark));
                if self.scenario.fault != Some(Fault::FreedNotSent) {
                    for slot in freed {
                        self.remote_slots[number].forget(slot);
                    }
                }
            }
            ToConsumer::NeedsMemory => {
                let has_tasks = |&other: &usize| self.num_received[other] < self.num_sent[other];
                let others = (0..self.producers.len()).filter(|&other| other != number);
                let earlier = others.filter(has_tasks).count() as u64;
                if self.shared_budget.reserve(SLOT_BYTES, earlier * SLOT_BYTES) {
                    self.producers[number].inbox.push_back(ToProducer::Granted);
                } else {
                    self.is_waiting[number] = true;
                }
            }
        }
        Ok(())
    }

    fn drop_user(&mut self, at: usize) {
        let held = &mut self.held[at];
        let first = held.owners.len() == self.scenario.num_owners;
        if first && self.scenario.fault == Some(Fault::ReturnedWithTheFirstOwner) {
            self.returned_early[held.producer].push(held.slot);
        }
        held.owners.pop();
        if held.owners.is_empty() {
            self.held.remove(at);
        }
    }

    fn check(&self) -> Result<(), String> {
        for held in &self.held {
            if !held.owners.iter().all(|borrowed| crate::bytes::all_are(borrowed, held.mark)) {
                return Err(format!("slot {} changed under its users", self.name_of(held)));
            }
            if self.remote_slots[held.producer].borrow(held.slot).is_ok() {
                return Err(format!("slot {} is borrowed twice", self.name_of(held)));
            }
        }
        for producer in &self.producers {
            if producer.local_slot.as_ref().is_some_and(|slot| !is_filled(slot, LOCAL_BYTE)) {
                return Err("the slot of another thread changed under it".into());
            }
        }
        if self.shared_budget.reserved() > u64::MAX / 2 {
            return Err("more was released than reserved".into());
        }
        Ok(())
    }

    /// Checks the final state, in which no step is possible.
    pub(crate) fn check_end(mut self) -> Result<(), String> {
        for number in 0..self.producers.len() {
            if self.producers[number].num_filled < self.scenario.num_tasks {
                return Err(format!(
                    "producer {number} waits forever at {:?}",
                    self.producers[number].state
                ));
            }
            // The slots that the next task would return.
            for slot in self.remote_slots[number].take_returned().0 {
                self.shared_budget.reserve_anyway(SLOT_BYTES);
                self.producers[number].sent.remove(&slot);
            }
        }
        let mut there = 0;
        for (number, producer) in self.producers.iter().enumerate() {
            let (all, free) = (producer.arena.total_bytes(), producer.arena.free_bytes());
            if all != free {
                return Err(format!(
                    "slots of producer {number} are lost: {free} of {all} bytes are free"
                ));
            }
            there += all as u64;
            let free_slots = free_slots(&producer.arena);
            for (slot, holder) in known(&self.remote_slots[number], &producer.names) {
                if holder != "Owner" {
                    return Err(format!(
                        "the remote slots do not say that the producer owns slot {slot}"
                    ));
                }
                if !free_slots.contains(&slot) && !producer.freed.contains(&slot) {
                    return Err(format!("slot {slot} is freed, but not forgotten"));
                }
            }
        }
        if self.shared_budget.reserved() != there {
            let reserved = self.shared_budget.reserved();
            return Err(format!("{reserved} bytes are reserved, but {there} exist"));
        }
        Ok(())
    }

    fn name_of(&self, held: &Held) -> String {
        format!(
            "{} of producer {}",
            self.producers[held.producer].name_of(held.slot),
            held.producer
        )
    }

    /// The state as text, for comparison. The state of the engine's types is taken from their
    /// `Debug` texts; slots are numbered in the order of allocation.
    pub(crate) fn key(&self) -> String {
        let mut key = format!(
            "{} {:?} {:?} {:?}",
            self.shared_budget.reserved() / SLOT_BYTES,
            self.num_sent,
            self.num_received,
            self.is_waiting
        );
        for (number, producer) in self.producers.iter().enumerate() {
            producer.add_key(&mut key);
            let remote_slots = &self.remote_slots[number];
            let known = known(remote_slots, &producer.names).into_iter();
            let known: Vec<_> =
                known.map(|(slot, holder)| (producer.name_of(slot), holder)).collect();
            let returned = producer.names_of(&returned(remote_slots));
            let returned_early = producer.names_of(&self.returned_early[number]);
            let results: Vec<_> = self.results[number]
                .iter()
                .map(|&(slot, mark)| (producer.name_of(slot), mark))
                .collect();
            write!(key, "|{known:?} {returned:?} {returned_early:?} {results:?}").unwrap();
        }
        for held in &self.held {
            let name = self.producers[held.producer].name_of(held.slot);
            write!(key, "|{} {name} {} {}", held.producer, held.mark, held.owners.len()).unwrap();
        }
        match &self.first_call {
            Some(FirstCall::SendTask(number, returned)) => {
                let returned = self.producers[*number].names_of(returned);
                write!(key, "|give {number} {returned:?}").unwrap();
            }
            Some(FirstCall::Take(_)) => key.push_str("|take"),
            None => {}
        }
        key
    }
}

impl Producer {
    fn new(number: usize, num_local_slots: usize) -> Self {
        Self {
            number,
            arena: Arena::shared(true),
            state: State::Idle,
            inbox: VecDeque::new(),
            outbox: VecDeque::new(),
            tasks: VecDeque::new(),
            sent: BTreeMap::new(),
            freed: Vec::new(),
            num_filled: 0,
            local_slot: None,
            num_local_slots,
            names: Vec::new(),
        }
    }

    fn can_continue(&self) -> bool {
        match self.state {
            State::Idle => !self.tasks.is_empty() || !self.inbox.is_empty(),
            State::Await => !self.inbox.is_empty(),
            _ => true,
        }
    }

    /// Whether the lock of `SharedArena` is free.
    fn is_unlocked(&self) -> bool {
        matches!(self.state, State::Idle | State::Allocate | State::Send(_))
    }

    fn advance(&mut self, shared_budget: &SharedBudget, scenario: Scenario) -> Result<(), String> {
        let budget = usize::try_from(scenario.budget * SLOT_BYTES).unwrap();
        let fault = scenario.fault;
        let spare = NUM_SPARE * scenario.num_producers as u64 * SLOT_BYTES;
        self.state = match std::mem::take(&mut self.state) {
            State::Idle => {
                for slot in self.next_task()? {
                    self.sent.remove(&slot);
                }
                State::StartTask
            }
            State::StartTask if scenario.frugal => {
                State::Trim { max_free: 0, then: AfterTrim::Allocate }
            }
            State::StartTask => State::CheckBudget(self.arena.free_bytes()),
            State::CheckBudget(free) => {
                let excess =
                    usize::try_from(shared_budget.reserved()).unwrap().saturating_sub(budget);
                if free > 0 && excess > 0 {
                    State::Trim { max_free: free.saturating_sub(excess), then: AfterTrim::Allocate }
                } else {
                    State::Allocate
                }
            }
            State::Trim { max_free, then } => {
                State::Trimming { max_free, before: self.count(fault), then }
            }
            State::Trimming { max_free, before, then } => {
                self.freed.append(&mut self.arena.trim(max_free));
                State::Trimmed { before, then }
            }
            State::Trimmed { before, then } => {
                let after = self.count(fault);
                let byte_len =
                    before.checked_sub(after).ok_or("a negative number of bytes released")?;
                shared_budget
                    .release(byte_len as u64)
                    .map_err(|_| "more bytes released than reserved")?;
                match then {
                    AfterTrim::Allocate => State::Allocate,
                    AfterTrim::ReserveAgain => State::Reserve { again: true },
                }
            }
            State::Allocate => match self.arena.growth(SLOT) {
                0 => State::Slot(0),
                _ => State::Reserve { again: false },
            },
            State::Reserve { again } => {
                let fits = if fault == Some(Fault::ReservedInTwoSteps) {
                    shared_budget.reserved() + SLOT_BYTES + spare <= budget as u64
                } else {
                    shared_budget.reserve(SLOT_BYTES, spare)
                };
                if fits && fault == Some(Fault::ReservedInTwoSteps) {
                    State::Add
                } else if fits {
                    within_budget(shared_budget, budget as u64 - spare)?;
                    State::Slot(SLOT_BYTES)
                } else if again {
                    self.outbox.push_back(ToConsumer::NeedsMemory);
                    State::Await
                } else {
                    State::Trim { max_free: 0, then: AfterTrim::ReserveAgain }
                }
            }
            State::Add => {
                shared_budget.reserve_anyway(SLOT_BYTES);
                within_budget(shared_budget, budget as u64 - spare)?;
                State::Slot(SLOT_BYTES)
            }
            State::Await => match self.inbox.pop_front().ok_or("no message")? {
                ToProducer::Granted => State::Slot(SLOT_BYTES),
                ToProducer::Task(returned) => {
                    self.tasks.push_back(returned);
                    State::Await
                }
            },
            State::Slot(reserved) => {
                let (slot, grown) = self.allocate()?;
                State::ReleaseUnused { reserved, grown, slot }
            }
            State::ReleaseUnused { reserved, grown, slot } => {
                if fault != Some(Fault::CountedByFreeSlots) {
                    let unused =
                        reserved.checked_sub(grown).ok_or("more bytes allocated than reserved")?;
                    shared_budget
                        .release(unused)
                        .map_err(|_| "more bytes released than reserved")?;
                }
                State::Send(slot)
            }
            State::Send(slot) => {
                self.send(slot, fault);
                State::Idle
            }
        };
        Ok(())
    }

    fn next_task(&mut self) -> Result<Vec<u64>, String> {
        if let Some(returned) = self.tasks.pop_front() {
            return Ok(returned);
        }
        match self.inbox.pop_front() {
            Some(ToProducer::Task(returned)) => Ok(returned),
            other => Err(format!("{other:?} instead of a task")),
        }
    }

    fn count(&self, fault: Option<Fault>) -> usize {
        match fault {
            Some(Fault::CountedByFreeSlots) => self.arena.free_bytes(),
            _ => self.arena.total_bytes(),
        }
    }

    /// Allocates a slot; returns it and the bytes by which the arena grew.
    fn allocate(&mut self) -> Result<(Slot, u64), String> {
        let before = self.arena.total_bytes();
        let slot = self.arena.slot(SLOT).map_err(|error| error.to_string())?;
        let grown = (self.arena.total_bytes() - before) as u64;
        let id = slot.shared_id().ok_or("a slot without a number")?;
        if grown > 0 {
            self.names.push(id);
        }
        if !is_filled(&slot, if grown > 0 { 0 } else { POISON }) {
            return Err(format!("slot {} was written while it was free", self.name_of(id)));
        }
        Ok((slot, grown))
    }

    fn send(&mut self, mut slot: Slot, fault: Option<Fault>) {
        let mark = u8::try_from(self.number * 64 + self.num_filled + 1).unwrap();
        slot.bytes_mut().fill(mark);
        self.num_filled += 1;
        let id = slot.shared_id().unwrap();
        if let Some((file, byte_len)) = slot.take_file() {
            self.outbox.push_back(ToConsumer::Slot(id, file, byte_len));
        }
        let freed = std::mem::take(&mut self.freed);
        self.outbox.push_back(ToConsumer::Filled { slot: id, mark, freed });
        if fault != Some(Fault::ReusedOnceSent) {
            self.sent.insert(id, slot);
        }
    }

    /// The other thread of this process, which does not wait for memory.
    fn advance_other_thread(&mut self, shared_budget: &SharedBudget) -> Result<(), String> {
        if self.local_slot.take().is_some() {
            return Ok(());
        }
        self.num_local_slots -= 1;
        let growth = self.arena.growth(SLOT) as u64;
        if growth == 0 || shared_budget.reserve(growth, NUM_SPARE * SLOT_BYTES) {
            let (mut slot, grown) = self.allocate()?;
            shared_budget
                .release(growth - grown)
                .map_err(|_| "more bytes released than reserved")?;
            slot.bytes_mut().fill(LOCAL_BYTE);
            self.local_slot = Some(slot);
        }
        Ok(())
    }

    fn name_of(&self, slot: u64) -> usize {
        self.names.iter().position(|&id| id == slot).unwrap()
    }

    fn names_of(&self, slots: &[u64]) -> Vec<usize> {
        slots.iter().map(|&slot| self.name_of(slot)).collect()
    }

    fn add_key(&self, key: &mut String) {
        let id = |slot: &Slot| self.name_of(slot.shared_id().unwrap());
        match &self.state {
            State::ReleaseUnused { reserved, grown, slot } => {
                write!(key, "|release_unused {reserved} {grown} {}", id(slot)).unwrap();
            }
            State::Send(slot) => write!(key, "|send {}", id(slot)).unwrap(),
            state => write!(key, "|{state:?}").unwrap(),
        }
        for message in &self.inbox {
            match message {
                ToProducer::Task(returned) => {
                    write!(key, " task {:?}", self.names_of(returned)).unwrap();
                }
                ToProducer::Granted => key.push_str(" granted"),
            }
        }
        for message in &self.outbox {
            match message {
                ToConsumer::Slot(slot, ..) => write!(key, " slot {}", self.name_of(*slot)).unwrap(),
                ToConsumer::Filled { slot, mark, freed } => {
                    let (slot, freed) = (self.name_of(*slot), self.names_of(freed));
                    write!(key, " filled {slot} {mark} {freed:?}").unwrap();
                }
                ToConsumer::NeedsMemory => key.push_str(" need"),
            }
        }
        let tasks: Vec<_> = self.tasks.iter().map(|returned| self.names_of(returned)).collect();
        let sent: Vec<_> = self.sent.values().map(id).collect();
        write!(
            key,
            "|{tasks:?} {sent:?} {:?} {:?} {} {:?} {} {}",
            self.names_of(&free_slots(&self.arena)),
            self.names_of(&self.freed),
            self.num_filled,
            self.local_slot.as_ref().map(id),
            self.num_local_slots,
            self.arena.total_bytes()
        )
        .unwrap();
    }
}

fn within_budget(shared_budget: &SharedBudget, max: u64) -> Result<(), String> {
    let reserved = shared_budget.reserved();
    if reserved <= max { Ok(()) } else { Err(format!("{reserved} bytes were reserved of {max}")) }
}

fn is_filled(slot: &Slot, byte: u8) -> bool {
    slot.bytes().iter().all(|&found| found == byte)
}

/// The free slots of an arena, longest free first.
fn free_slots(arena: &Arena) -> Vec<u64> {
    numbers_after(&format!("{arena:?}"), "Identity { id: ")
}

/// The returned slots that have not been collected yet.
fn returned(remote_slots: &RemoteSlots) -> Vec<u64> {
    let text = format!("{remote_slots:?}");
    let (_, list) = text.split_once("returned: [").unwrap();
    let (list, _) = list.split_once(']').unwrap();
    list.split(", ").filter_map(|number| number.parse().ok()).collect()
}

/// The slots of `slots` that are known to the consumer, and their holders.
fn known(remote_slots: &RemoteSlots, slots: &[u64]) -> Vec<(u64, String)> {
    let text = format!("{remote_slots:?}");
    let holder = |slot: u64| {
        let found = [format!("{{{slot}: MappedSlot"), format!(", {slot}: MappedSlot")];
        let (_, entry) = found.iter().find_map(|entry| text.split_once(entry.as_str()))?;
        let (_, holder) = entry.split_once("holder: ")?;
        Some((slot, holder.split(' ').next()?.to_owned()))
    };
    slots.iter().filter_map(|&slot| holder(slot)).collect()
}

fn numbers_after(text: &str, label: &str) -> Vec<u64> {
    let found = text.split(label).skip(1);
    found
        .map(|rest| rest.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap())
        .collect()
}
