//! Makers and the receiver of their slots, moved one step at a time, over the engine's own types.
//!
//! What the makers and the receiver do is what `grainmill._workers` does, call by call. A step is
//! one call into the engine, with what its caller alone can see. That leaves no schedule out: each
//! of these calls looks at, or changes, what others share under one lock or by one atomic number.
//! What it does beside that (filling a slot with poison, mapping it, copying an `Arc`) is about
//! memory that nobody else has at that time; and the bytes that an arena counts in all are read and
//! changed under the lock of its maker only.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use grainmill_core::batch::{Arena, BorrowedSlot, RemoteSlots, Slot};
use grainmill_core::pipeline::SharedBudget;

/// Bytes of every slot: one size class, and no more than a page.
const SLOT: usize = 512;
const SLOT_BYTES: u64 = SLOT as u64;
const POISON: u8 = 0xA5;
/// What the bystander writes into its slots.
const STRAY: u8 = 0xEE;
/// What a worker leaves room for when it reserves.
const SPARE: u64 = 2;

/// What is to be explored.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scenario {
    pub(crate) num_makers: usize,
    /// Tasks for each maker, one slot each.
    pub(crate) num_tasks: usize,
    /// How many users of the receiver hold each slot.
    pub(crate) num_owners: usize,
    /// How often another thread of each maker's process makes a slot, to drop it at any time.
    pub(crate) num_strays: usize,
    /// Slots that all together may hold before they are taken.
    pub(crate) budget: u64,
    /// Whether makers give back all that waits before each task.
    pub(crate) frugal: bool,
    pub(crate) fault: Option<Fault>,
}

/// A mistake that the exploration must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The maker is told of a slot's return when the first of its users is gone.
    ToldWithTheFirstOwner,
    /// The maker takes its slot back as soon as it is sent.
    ReusedOnceSent,
    /// A task is sent without the slots that were returned.
    ReturnsNotTold,
    /// The maker forgets slots that the receiver should forget too.
    DropsNotTold,
    /// What a maker reserves and releases is computed from the slots that wait, to which any
    /// thread adds; not from those there are.
    CountedByWaitingSlots,
    /// A reservation looks first and adds then.
    ReservedInTwoSteps,
}

/// What happens next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Maker `0` makes its next call.
    Maker(usize),
    /// The other thread in the process of maker `0` makes or drops its slot.
    Stray(usize),
    /// The receiver collects what goes with a task for maker `0`.
    Give(usize),
    /// The receiver takes in the next message of maker `0`.
    Hear(usize),
    /// The receiver awaits maker `0`, which waits for memory.
    Grant(usize),
    /// The receiver hands the oldest result of maker `0` to its users.
    Take(usize),
    /// The receiver makes the second call of the two that it has begun.
    Continue,
    /// One user of the slot at this place among those lent lets go of it.
    Drop(usize),
}

#[derive(Debug)]
enum ToMaker {
    Task(Vec<u64>),
    Granted,
}

#[derive(Debug)]
enum ToReceiver {
    Slot(u64, OwnedFd, usize),
    Made { slot: u64, mark: u8, dropped: Vec<u64> },
    Need,
}

/// Where a maker is, between two calls.
#[derive(Debug, Default)]
enum At {
    #[default]
    Idle,
    Tidy,
    /// With the bytes that waited.
    Weigh(usize),
    Trim {
        most_free: usize,
        then: Then,
    },
    /// With the bytes there were before.
    Trimming {
        most_free: usize,
        before: usize,
        then: Then,
    },
    Trimmed {
        before: usize,
        then: Then,
    },
    Make,
    Reserve {
        again: bool,
    },
    /// The fault: it fits, as far as was seen.
    AddUp,
    Await,
    /// With the bytes it reserved.
    Slot(u64),
    Settle {
        reserved: u64,
        grown: u64,
        slot: Slot,
    },
    Send(Slot),
}

#[derive(Clone, Copy, Debug)]
enum Then {
    Make,
    ReserveAgain,
}

#[derive(Debug)]
struct Maker {
    number: usize,
    arena: Arena,
    at: At,
    inbox: VecDeque<ToMaker>,
    outbox: VecDeque<ToReceiver>,
    /// Tasks that came while it waited for memory.
    tasks: VecDeque<Vec<u64>>,
    sent: BTreeMap<u64, Slot>,
    dropped: Vec<u64>,
    num_made: usize,
    stray: Option<Slot>,
    num_strays: usize,
    /// Its slots' numbers in the order in which they were made.
    names: Vec<u64>,
}

/// A slot in the hands of users.
#[derive(Debug)]
struct Held {
    maker: usize,
    slot: u64,
    mark: u8,
    owners: Vec<Arc<BorrowedSlot>>,
}

/// What the receiver is in the middle of.
#[derive(Debug)]
enum Begun {
    Give(usize, Vec<u64>),
    Take(u64),
}

/// Everything, between two steps.
#[derive(Debug)]
pub(crate) struct World {
    scenario: Scenario,
    shared_budget: SharedBudget,
    makers: Vec<Maker>,
    lenders: Vec<RemoteSlots>,
    num_given: Vec<usize>,
    num_heard: Vec<usize>,
    answers: Vec<VecDeque<(u64, u8)>>,
    needs: Vec<bool>,
    begun: Option<Begun>,
    held: Vec<Held>,
    /// The fault's own list of what is told as returned.
    early: Vec<Vec<u64>>,
}

impl World {
    pub(crate) fn new(scenario: Scenario) -> Self {
        let count = scenario.num_makers;
        let (shared_budget, _) = SharedBudget::create(count, scenario.budget * SLOT_BYTES).unwrap();
        Self {
            scenario,
            shared_budget,
            makers: (0..count).map(|number| Maker::new(number, scenario.num_strays)).collect(),
            lenders: (0..count).map(|_| RemoteSlots::new(true)).collect(),
            num_given: vec![0; count],
            num_heard: vec![0; count],
            answers: vec![VecDeque::new(); count],
            needs: vec![false; count],
            begun: None,
            held: Vec::new(),
            early: vec![Vec::new(); count],
        }
    }

    /// What can happen next; nothing where all is done, or nothing can go on.
    pub(crate) fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        for (number, maker) in self.makers.iter().enumerate() {
            if maker.can_go_on() {
                steps.push(Step::Maker(number));
            }
            if maker.stray.is_some() || (maker.num_strays > 0 && maker.lets_others_in()) {
                steps.push(Step::Stray(number));
            }
            if self.begun.is_some() {
                continue;
            }
            if self.num_given[number] < self.scenario.num_tasks {
                steps.push(Step::Give(number));
            }
            if !maker.outbox.is_empty() {
                steps.push(Step::Hear(number));
            }
            if self.needs[number] {
                steps.push(Step::Grant(number));
            }
            if !self.answers[number].is_empty() {
                steps.push(Step::Take(number));
            }
        }
        if self.begun.is_some() {
            steps.push(Step::Continue);
        }
        let held = self.held.iter().enumerate().filter(|(_, held)| !held.owners.is_empty());
        steps.extend(held.map(|(place, _)| Step::Drop(place)));
        steps
    }

    /// Does `step`, and then looks whether all that must hold at any time does.
    pub(crate) fn take(&mut self, step: Step) -> Result<(), String> {
        match step {
            Step::Maker(number) => self.makers[number].go_on(&self.shared_budget, self.scenario)?,
            Step::Stray(number) => self.makers[number].go_astray(&self.shared_budget)?,
            Step::Give(number) => {
                let (mut returned, _) = self.lenders[number].take_returned();
                returned.append(&mut self.early[number]);
                self.num_given[number] += 1;
                self.begun = Some(Begun::Give(number, returned));
            }
            Step::Hear(number) => self.hear(number)?,
            Step::Grant(number) => {
                self.shared_budget.reserve_anyway(SLOT_BYTES);
                self.needs[number] = false;
                self.makers[number].inbox.push_back(ToMaker::Granted);
            }
            Step::Take(number) => {
                let (slot, mark) = self.answers[number].pop_front().ok_or("no answer")?;
                let lent = Arc::new(self.lenders[number].borrow(slot).map_err(|e| e.to_string())?);
                self.begun = Some(Begun::Take(lent.byte_len() as u64));
                let owners = vec![lent; self.scenario.num_owners];
                self.held.push(Held { maker: number, slot, mark, owners });
            }
            Step::Continue => self.continue_begun(),
            Step::Drop(place) => self.let_go(place),
        }
        self.check()
    }

    fn continue_begun(&mut self) {
        match self.begun.take() {
            Some(Begun::Take(byte_len)) => self.shared_budget.release(byte_len).expect("reserved"),
            Some(Begun::Give(number, mut returned)) => {
                for _ in &returned {
                    self.shared_budget.reserve_anyway(SLOT_BYTES);
                }
                if self.scenario.fault == Some(Fault::ReturnsNotTold) {
                    returned.clear();
                }
                self.makers[number].inbox.push_back(ToMaker::Task(returned));
            }
            None => {}
        }
    }

    fn hear(&mut self, number: usize) -> Result<(), String> {
        match self.makers[number].outbox.pop_front().ok_or("no message")? {
            ToReceiver::Slot(slot, file, byte_len) => {
                let added = self.lenders[number].add(slot, file.as_fd(), byte_len);
                added.map_err(|error| error.to_string())?;
            }
            ToReceiver::Made { slot, mark, dropped } => {
                self.num_heard[number] += 1;
                self.answers[number].push_back((slot, mark));
                if self.scenario.fault != Some(Fault::DropsNotTold) {
                    for slot in dropped {
                        self.lenders[number].forget(slot);
                    }
                }
            }
            ToReceiver::Need => {
                let busy = |&other: &usize| self.num_heard[other] < self.num_given[other];
                let others = (0..self.makers.len()).filter(|&other| other != number);
                let earlier = others.filter(busy).count() as u64;
                if self.shared_budget.reserve(SLOT_BYTES, earlier * SLOT_BYTES) {
                    self.makers[number].inbox.push_back(ToMaker::Granted);
                } else {
                    self.needs[number] = true;
                }
            }
        }
        Ok(())
    }

    fn let_go(&mut self, place: usize) {
        let held = &mut self.held[place];
        let first = held.owners.len() == self.scenario.num_owners;
        if first && self.scenario.fault == Some(Fault::ToldWithTheFirstOwner) {
            self.early[held.maker].push(held.slot);
        }
        held.owners.pop();
        if held.owners.is_empty() {
            self.held.remove(place);
        }
    }

    fn check(&self) -> Result<(), String> {
        for held in &self.held {
            if !held.owners.iter().all(|lent| crate::bytes::all_are(lent, held.mark)) {
                return Err(format!("slot {} changed under its users", self.name_of(held)));
            }
            if self.lenders[held.maker].borrow(held.slot).is_ok() {
                return Err(format!("slot {} is lent twice", self.name_of(held)));
            }
        }
        for maker in &self.makers {
            if maker.stray.as_ref().is_some_and(|slot| !is_filled(slot, STRAY)) {
                return Err("the slot of another thread changed under it".into());
            }
        }
        if self.shared_budget.reserved() > u64::MAX / 2 {
            return Err("more was released than reserved".into());
        }
        Ok(())
    }

    /// Looks at a world in which nothing can happen any more.
    pub(crate) fn check_end(mut self) -> Result<(), String> {
        for number in 0..self.makers.len() {
            if self.makers[number].num_made < self.scenario.num_tasks {
                return Err(format!(
                    "maker {number} waits for ever at {:?}",
                    self.makers[number].at
                ));
            }
            // What would go with the next task.
            for slot in self.lenders[number].take_returned().0 {
                self.shared_budget.reserve_anyway(SLOT_BYTES);
                self.makers[number].sent.remove(&slot);
            }
        }
        let mut there = 0;
        for (number, maker) in self.makers.iter().enumerate() {
            let (all, free) = (maker.arena.total_bytes(), maker.arena.free_bytes());
            if all != free {
                return Err(format!(
                    "slots of maker {number} are lost: {free} of {all} bytes wait"
                ));
            }
            there += all as u64;
            let waiting = waiting(&maker.arena);
            for (slot, holder) in known(&self.lenders[number], &maker.names) {
                if holder != "Maker" {
                    return Err(format!("slot {slot} is not its maker's in the ledger"));
                }
                if !waiting.contains(&slot) && !maker.dropped.contains(&slot) {
                    return Err(format!("slot {slot} is gone, but not forgotten"));
                }
            }
        }
        if self.shared_budget.reserved() != there {
            let reserved = self.shared_budget.reserved();
            return Err(format!("{reserved} bytes are reserved where there are {there}"));
        }
        Ok(())
    }

    fn name_of(&self, held: &Held) -> String {
        format!("{} of maker {}", self.makers[held.maker].name_of(held.slot), held.maker)
    }

    /// All that the future depends on. Of the engine's types it has what they hold themselves, as
    /// their `Debug` texts tell; slots are named in the order in which they were made.
    pub(crate) fn key(&self) -> String {
        let mut key = format!(
            "{} {:?} {:?} {:?}",
            self.shared_budget.reserved() / SLOT_BYTES,
            self.num_given,
            self.num_heard,
            self.needs
        );
        for (number, maker) in self.makers.iter().enumerate() {
            maker.add_key(&mut key);
            let remote_slots = &self.lenders[number];
            let known = known(remote_slots, &maker.names).into_iter();
            let known: Vec<_> = known.map(|(slot, holder)| (maker.name_of(slot), holder)).collect();
            let returned = maker.names_of(&returned(remote_slots));
            let early = maker.names_of(&self.early[number]);
            let answers: Vec<_> = self.answers[number]
                .iter()
                .map(|&(slot, mark)| (maker.name_of(slot), mark))
                .collect();
            write!(key, "|{known:?} {returned:?} {early:?} {answers:?}").unwrap();
        }
        for held in &self.held {
            let name = self.makers[held.maker].name_of(held.slot);
            write!(key, "|{} {name} {} {}", held.maker, held.mark, held.owners.len()).unwrap();
        }
        match &self.begun {
            Some(Begun::Give(number, returned)) => {
                let returned = self.makers[*number].names_of(returned);
                write!(key, "|give {number} {returned:?}").unwrap();
            }
            Some(Begun::Take(_)) => key.push_str("|take"),
            None => {}
        }
        key
    }
}

impl Maker {
    fn new(number: usize, num_strays: usize) -> Self {
        Self {
            number,
            arena: Arena::shared(true),
            at: At::Idle,
            inbox: VecDeque::new(),
            outbox: VecDeque::new(),
            tasks: VecDeque::new(),
            sent: BTreeMap::new(),
            dropped: Vec::new(),
            num_made: 0,
            stray: None,
            num_strays,
            names: Vec::new(),
        }
    }

    fn can_go_on(&self) -> bool {
        match self.at {
            At::Idle => !self.tasks.is_empty() || !self.inbox.is_empty(),
            At::Await => !self.inbox.is_empty(),
            _ => true,
        }
    }

    /// Whether the lock of `SharedArena` is open.
    fn lets_others_in(&self) -> bool {
        matches!(self.at, At::Idle | At::Make | At::Send(_))
    }

    fn go_on(&mut self, shared_budget: &SharedBudget, scenario: Scenario) -> Result<(), String> {
        let budget = usize::try_from(scenario.budget * SLOT_BYTES).unwrap();
        let fault = scenario.fault;
        let spare = SPARE * scenario.num_makers as u64 * SLOT_BYTES;
        self.at = match std::mem::take(&mut self.at) {
            At::Idle => {
                for slot in self.next_task()? {
                    self.sent.remove(&slot);
                }
                At::Tidy
            }
            At::Tidy if scenario.frugal => At::Trim { most_free: 0, then: Then::Make },
            At::Tidy => At::Weigh(self.arena.free_bytes()),
            At::Weigh(free) => {
                let excess =
                    usize::try_from(shared_budget.reserved()).unwrap().saturating_sub(budget);
                if free > 0 && excess > 0 {
                    At::Trim { most_free: free.saturating_sub(excess), then: Then::Make }
                } else {
                    At::Make
                }
            }
            At::Trim { most_free, then } => {
                At::Trimming { most_free, before: self.count(fault), then }
            }
            At::Trimming { most_free, before, then } => {
                self.dropped.append(&mut self.arena.trim(most_free));
                At::Trimmed { before, then }
            }
            At::Trimmed { before, then } => {
                let after = self.count(fault);
                let byte_len = before.checked_sub(after).ok_or("fewer than no bytes released")?;
                shared_budget.release(byte_len as u64).map_err(|_| "memory nobody reserved")?;
                match then {
                    Then::Make => At::Make,
                    Then::ReserveAgain => At::Reserve { again: true },
                }
            }
            At::Make => match self.arena.growth(SLOT) {
                0 => At::Slot(0),
                _ => At::Reserve { again: false },
            },
            At::Reserve { again } => {
                let fits = if fault == Some(Fault::ReservedInTwoSteps) {
                    shared_budget.reserved() + SLOT_BYTES + spare <= budget as u64
                } else {
                    shared_budget.reserve(SLOT_BYTES, spare)
                };
                if fits && fault == Some(Fault::ReservedInTwoSteps) {
                    At::AddUp
                } else if fits {
                    within_budget(shared_budget, budget as u64 - spare)?;
                    At::Slot(SLOT_BYTES)
                } else if again {
                    self.outbox.push_back(ToReceiver::Need);
                    At::Await
                } else {
                    At::Trim { most_free: 0, then: Then::ReserveAgain }
                }
            }
            At::AddUp => {
                shared_budget.reserve_anyway(SLOT_BYTES);
                within_budget(shared_budget, budget as u64 - spare)?;
                At::Slot(SLOT_BYTES)
            }
            At::Await => match self.inbox.pop_front().ok_or("nothing to hear")? {
                ToMaker::Granted => At::Slot(SLOT_BYTES),
                ToMaker::Task(returned) => {
                    self.tasks.push_back(returned);
                    At::Await
                }
            },
            At::Slot(reserved) => {
                let (slot, grown) = self.made()?;
                At::Settle { reserved, grown, slot }
            }
            At::Settle { reserved, grown, slot } => {
                if fault != Some(Fault::CountedByWaitingSlots) {
                    let left = reserved.checked_sub(grown).ok_or("memory nobody reserved")?;
                    shared_budget.release(left).map_err(|_| "memory nobody reserved")?;
                }
                At::Send(slot)
            }
            At::Send(slot) => {
                self.send(slot, fault);
                At::Idle
            }
        };
        Ok(())
    }

    fn next_task(&mut self) -> Result<Vec<u64>, String> {
        if let Some(returned) = self.tasks.pop_front() {
            return Ok(returned);
        }
        match self.inbox.pop_front() {
            Some(ToMaker::Task(returned)) => Ok(returned),
            other => Err(format!("{other:?} where a task was due")),
        }
    }

    fn count(&self, fault: Option<Fault>) -> usize {
        match fault {
            Some(Fault::CountedByWaitingSlots) => self.arena.free_bytes(),
            _ => self.arena.total_bytes(),
        }
    }

    /// A slot, and the bytes by which the arena grew for it.
    fn made(&mut self) -> Result<(Slot, u64), String> {
        let before = self.arena.total_bytes();
        let slot = self.arena.slot(SLOT).map_err(|error| error.to_string())?;
        let grown = (self.arena.total_bytes() - before) as u64;
        let id = slot.shared_id().ok_or("a slot without a number")?;
        if grown > 0 {
            self.names.push(id);
        }
        if !is_filled(&slot, if grown > 0 { 0 } else { POISON }) {
            return Err(format!("slot {} was written while it waited", self.name_of(id)));
        }
        Ok((slot, grown))
    }

    fn send(&mut self, mut slot: Slot, fault: Option<Fault>) {
        let mark = u8::try_from(self.number * 64 + self.num_made + 1).unwrap();
        slot.bytes_mut().fill(mark);
        self.num_made += 1;
        let id = slot.shared_id().unwrap();
        if let Some((file, byte_len)) = slot.take_file() {
            self.outbox.push_back(ToReceiver::Slot(id, file, byte_len));
        }
        let dropped = std::mem::take(&mut self.dropped);
        self.outbox.push_back(ToReceiver::Made { slot: id, mark, dropped });
        if fault != Some(Fault::ReusedOnceSent) {
            self.sent.insert(id, slot);
        }
    }

    /// The other thread of this process, which does not wait for room.
    fn go_astray(&mut self, shared_budget: &SharedBudget) -> Result<(), String> {
        if self.stray.take().is_some() {
            return Ok(());
        }
        self.num_strays -= 1;
        let growth = self.arena.growth(SLOT) as u64;
        if growth == 0 || shared_budget.reserve(growth, SPARE * SLOT_BYTES) {
            let (mut slot, grown) = self.made()?;
            shared_budget.release(growth - grown).map_err(|_| "memory nobody reserved")?;
            slot.bytes_mut().fill(STRAY);
            self.stray = Some(slot);
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
        match &self.at {
            At::Settle { reserved, grown, slot } => {
                write!(key, "|settle {reserved} {grown} {}", id(slot)).unwrap();
            }
            At::Send(slot) => write!(key, "|send {}", id(slot)).unwrap(),
            at => write!(key, "|{at:?}").unwrap(),
        }
        for message in &self.inbox {
            match message {
                ToMaker::Task(returned) => {
                    write!(key, " task {:?}", self.names_of(returned)).unwrap();
                }
                ToMaker::Granted => key.push_str(" granted"),
            }
        }
        for message in &self.outbox {
            match message {
                ToReceiver::Slot(slot, ..) => write!(key, " slot {}", self.name_of(*slot)).unwrap(),
                ToReceiver::Made { slot, mark, dropped } => {
                    let (slot, dropped) = (self.name_of(*slot), self.names_of(dropped));
                    write!(key, " made {slot} {mark} {dropped:?}").unwrap();
                }
                ToReceiver::Need => key.push_str(" need"),
            }
        }
        let tasks: Vec<_> = self.tasks.iter().map(|returned| self.names_of(returned)).collect();
        let sent: Vec<_> = self.sent.values().map(id).collect();
        write!(
            key,
            "|{tasks:?} {sent:?} {:?} {:?} {} {:?} {} {}",
            self.names_of(&waiting(&self.arena)),
            self.names_of(&self.dropped),
            self.num_made,
            self.stray.as_ref().map(id),
            self.num_strays,
            self.arena.total_bytes()
        )
        .unwrap();
    }
}

fn within_budget(shared_budget: &SharedBudget, most: u64) -> Result<(), String> {
    let reserved = shared_budget.reserved();
    if reserved <= most { Ok(()) } else { Err(format!("{reserved} bytes got reserved of {most}")) }
}

fn is_filled(slot: &Slot, byte: u8) -> bool {
    slot.bytes().iter().all(|&found| found == byte)
}

/// The slots that wait in an arena, those that waited longest first.
fn waiting(arena: &Arena) -> Vec<u64> {
    numbers_after(&format!("{arena:?}"), "Identity { id: ")
}

/// The slots returned that nobody asked for yet.
fn returned(remote_slots: &RemoteSlots) -> Vec<u64> {
    let text = format!("{remote_slots:?}");
    let (_, list) = text.split_once("returned: [").unwrap();
    let (list, _) = list.split_once(']').unwrap();
    list.split(", ").filter_map(|number| number.parse().ok()).collect()
}

/// Which of `slots` the remote slots include, and who may write them.
fn known(remote_slots: &RemoteSlots, slots: &[u64]) -> Vec<(u64, String)> {
    let text = format!("{remote_slots:?}");
    let holder = |slot: u64| {
        let found = [format!("{{{slot}: Known"), format!(", {slot}: Known")];
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
