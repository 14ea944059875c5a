//! A model checker: explores every schedule of a few tasks with the engine's own types.
//!
//! It is a depth-first search that takes each step from each distinct state once. The engine's
//! state cannot be cloned, so to backtrack, the steps are replayed from the start. Injected faults
//! show that the search finds violations.

use std::collections::HashMap;

use crate::world::{Fault, Scenario, Step, World};

/// The size of the explored state space.
#[derive(Debug, Default)]
struct Explored {
    states: usize,
    steps: usize,
    /// The number of complete schedules.
    schedules: f64,
}

/// A state on the current path.
struct Visit {
    key: String,
    steps: Vec<Step>,
    num_tried: usize,
    num_schedules: f64,
}

impl Visit {
    fn of(world: &World) -> Self {
        Self { key: world.key(), steps: world.steps(), num_tried: 0, num_schedules: 0.0 }
    }
}

/// Explores all schedules; fails with the violation and the steps that led to it.
fn explore(scenario: Scenario) -> Result<Explored, String> {
    let mut world = Some(World::new(scenario));
    let mut path = vec![Visit::of(world.as_ref().unwrap())];
    let mut seen: HashMap<String, f64> = HashMap::new();
    let mut steps = 0;
    while let Some(visit) = path.last_mut() {
        if visit.num_tried == visit.steps.len() {
            let Some(mut done) = path.pop() else { break };
            if done.steps.is_empty() {
                done.num_schedules = 1.0;
                world
                    .take()
                    .unwrap()
                    .check_end()
                    .map_err(|violation| described(&violation, &path))?;
            }
            world = None;
            if let Some(before) = path.last_mut() {
                before.num_schedules += done.num_schedules;
            }
            seen.insert(done.key, done.num_schedules);
            continue;
        }
        visit.num_tried += 1;
        let step = visit.steps[visit.num_tried - 1];
        steps += 1;
        let mut next = world.take().unwrap_or_else(|| replay(scenario, &path));
        next.take(step).map_err(|violation| described(&violation, &path))?;
        let found = Visit::of(&next);
        if let Some(num_schedules) = seen.get(&found.key) {
            path.last_mut().unwrap().num_schedules += num_schedules;
        } else {
            assert!(
                path.iter().all(|visit| visit.key != found.key),
                "the state graph has no cycle"
            );
            path.push(found);
            world = Some(next);
        }
    }
    let schedules = seen[&World::new(scenario).key()];
    Ok(Explored { states: seen.len(), steps, schedules })
}

/// Replays `path` up to its last state.
fn replay(scenario: Scenario, path: &[Visit]) -> World {
    let mut world = World::new(scenario);
    for visit in &path[..path.len() - 1] {
        world.take(visit.steps[visit.num_tried - 1]).unwrap();
    }
    world
}

fn described(violation: &str, path: &[Visit]) -> String {
    let steps: Vec<_> = path.iter().map(|visit| visit.steps[visit.num_tried - 1]).collect();
    format!("{violation}, after {steps:?}")
}

/// One producer, with a budget so small that it waits for memory and frees some.
const TIGHT: Scenario = Scenario {
    num_producers: 1,
    num_tasks: 3,
    num_owners: 2,
    num_local_slots: 0,
    budget: 3,
    frugal: false,
    fault: None,
};
const TWO: Scenario = Scenario { num_producers: 2, num_tasks: 1, budget: 6, ..TIGHT };

#[expect(clippy::print_stdout, reason = "shown with --nocapture")]
fn check(scenarios: &[Scenario], min_states: usize) {
    let mut num_states = 0;
    for &scenario in scenarios {
        let explored =
            explore(scenario).unwrap_or_else(|violation| panic!("{scenario:?}: {violation}"));
        let Explored { states, steps, schedules } = explored;
        println!("{states} states, {steps} steps, {schedules:.1e} schedules of {scenario:?}");
        num_states += states;
    }
    assert!(num_states >= min_states, "only {num_states} states were explored");
}

#[test]
fn no_schedule_of_one_producer_violates_an_invariant() {
    let ample = Scenario { budget: 20, ..TIGHT };
    let frugal = Scenario { frugal: true, ..TIGHT };
    let many_tasks = Scenario { num_tasks: 4, ..TIGHT };
    check(&[TIGHT, ample, frugal, many_tasks], 15_000);
}

#[test]
fn no_schedule_of_a_producer_with_other_threads_violates_an_invariant() {
    let with_local_slots = Scenario { num_tasks: 2, num_local_slots: 2, ..TIGHT };
    let frugal = Scenario { budget: 4, frugal: true, ..with_local_slots };
    check(&[with_local_slots, frugal], 9_000);
}

#[test]
fn no_schedule_of_two_producers_violates_an_invariant() {
    let shared_by_owners = Scenario { budget: 5, ..TWO };
    let with_local_slots = Scenario { num_owners: 1, num_local_slots: 1, ..TWO };
    let frugal = Scenario { frugal: true, ..with_local_slots };
    check(&[shared_by_owners, with_local_slots, frugal], 20_000);
}

#[test]
#[ignore = "takes minutes"]
fn no_long_schedule_violates_an_invariant() {
    let one = Scenario { num_tasks: 4, num_local_slots: 1, frugal: true, ..TIGHT };
    let two = Scenario { num_tasks: 2, ..TWO };
    let two_frugal = Scenario { num_owners: 1, frugal: true, ..two };
    check(&[one, two, two_frugal], 250_000);
}

#[test]
fn every_injected_fault_is_found() {
    let with_local_slots = Scenario { num_tasks: 1, num_local_slots: 1, frugal: true, ..TIGHT };
    for (fault, scenario, message) in [
        (Fault::ReturnedWithTheFirstOwner, TIGHT, "changed under its users"),
        (Fault::ReusedOnceSent, TIGHT, "changed under its users"),
        (Fault::ReturnsNotSent, TIGHT, "are lost"),
        (Fault::FreedNotSent, Scenario { frugal: true, ..TIGHT }, "but not forgotten"),
        (Fault::CountedByFreeSlots, with_local_slots, "are reserved, but"),
        (Fault::ReservedInTwoSteps, Scenario { budget: 5, ..TWO }, "bytes were reserved of"),
    ] {
        let violation = explore(Scenario { fault: Some(fault), ..scenario }).unwrap_err();
        assert!(violation.contains(message), "{fault:?}: {violation}");
    }
}
