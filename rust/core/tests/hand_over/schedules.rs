//! Every schedule of a few tasks, over the engine's own types.
//!
//! Schedules that lead to the same state go on in the same way, so each state is left once by each
//! of its steps. The engine's state cannot be copied: to leave a state by another step, it is made
//! again from the beginning. Mistakes made on purpose show that the search finds them.

use std::collections::HashMap;

use crate::world::{Fault, Scenario, Step, World};

/// How much was seen.
#[derive(Debug, Default)]
struct Explored {
    states: usize,
    steps: usize,
    /// Orders of the steps, from the beginning to an end.
    schedules: f64,
}

/// A state on the way to the current one.
struct Place {
    key: String,
    steps: Vec<Step>,
    num_tried: usize,
    num_schedules: f64,
}

impl Place {
    fn of(world: &World) -> Self {
        Self { key: world.key(), steps: world.steps(), num_tried: 0, num_schedules: 0.0 }
    }
}

/// Goes every way from the beginning; fails with what is wrong and the steps that led there.
fn explore(scenario: Scenario) -> Result<Explored, String> {
    let mut world = Some(World::new(scenario));
    let mut way = vec![Place::of(world.as_ref().unwrap())];
    let mut seen: HashMap<String, f64> = HashMap::new();
    let mut steps = 0;
    while let Some(place) = way.last_mut() {
        if place.num_tried == place.steps.len() {
            let Some(mut done) = way.pop() else { break };
            if done.steps.is_empty() {
                done.num_schedules = 1.0;
                world.take().unwrap().check_end().map_err(|wrong| told(&wrong, &way))?;
            }
            world = None;
            if let Some(before) = way.last_mut() {
                before.num_schedules += done.num_schedules;
            }
            seen.insert(done.key, done.num_schedules);
            continue;
        }
        place.num_tried += 1;
        let step = place.steps[place.num_tried - 1];
        steps += 1;
        let mut next = world.take().unwrap_or_else(|| again(scenario, &way));
        next.take(step).map_err(|wrong| told(&wrong, &way))?;
        let found = Place::of(&next);
        if let Some(num_schedules) = seen.get(&found.key) {
            way.last_mut().unwrap().num_schedules += num_schedules;
        } else {
            assert!(way.iter().all(|place| place.key != found.key), "no way leads back");
            way.push(found);
            world = Some(next);
        }
    }
    let schedules = seen[&World::new(scenario).key()];
    Ok(Explored { states: seen.len(), steps, schedules })
}

/// The world before the last step of `way` that was tried.
fn again(scenario: Scenario, way: &[Place]) -> World {
    let mut world = World::new(scenario);
    for place in &way[..way.len() - 1] {
        world.take(place.steps[place.num_tried - 1]).unwrap();
    }
    world
}

fn told(wrong: &str, way: &[Place]) -> String {
    let steps: Vec<_> = way.iter().map(|place| place.steps[place.num_tried - 1]).collect();
    format!("{wrong}, after {steps:?}")
}

/// One maker, and room for so little that it waits for memory and gives some back.
const TIGHT: Scenario = Scenario {
    num_makers: 1,
    num_tasks: 3,
    num_owners: 2,
    num_strays: 0,
    budget: 3,
    frugal: false,
    fault: None,
};
const TWO: Scenario = Scenario { num_makers: 2, num_tasks: 1, budget: 6, ..TIGHT };

#[expect(clippy::print_stdout, reason = "shown with --nocapture")]
fn check(scenarios: &[Scenario], least_states: usize) {
    let mut num_states = 0;
    for &scenario in scenarios {
        let explored = explore(scenario).unwrap_or_else(|wrong| panic!("{scenario:?}: {wrong}"));
        let Explored { states, steps, schedules } = explored;
        println!("{states} states, {steps} steps, {schedules:.1e} schedules of {scenario:?}");
        num_states += states;
    }
    assert!(num_states >= least_states, "only {num_states} states were reached");
}

#[test]
fn no_schedule_of_one_maker_breaks_a_promise() {
    let ample = Scenario { budget: 20, ..TIGHT };
    let frugal = Scenario { frugal: true, ..TIGHT };
    let many_tasks = Scenario { num_tasks: 4, ..TIGHT };
    check(&[TIGHT, ample, frugal, many_tasks], 15_000);
}

#[test]
fn no_schedule_of_a_maker_with_other_threads_breaks_a_promise() {
    let with_strays = Scenario { num_tasks: 2, num_strays: 2, ..TIGHT };
    let frugal = Scenario { budget: 4, frugal: true, ..with_strays };
    check(&[with_strays, frugal], 9_000);
}

#[test]
fn no_schedule_of_two_makers_breaks_a_promise() {
    let shared_by_owners = Scenario { budget: 5, ..TWO };
    let with_strays = Scenario { num_owners: 1, num_strays: 1, ..TWO };
    let frugal = Scenario { frugal: true, ..with_strays };
    check(&[shared_by_owners, with_strays, frugal], 20_000);
}

#[test]
#[ignore = "takes minutes"]
fn no_long_schedule_breaks_a_promise() {
    let one = Scenario { num_tasks: 4, num_strays: 1, frugal: true, ..TIGHT };
    let two = Scenario { num_tasks: 2, ..TWO };
    let two_frugal = Scenario { num_owners: 1, frugal: true, ..two };
    check(&[one, two, two_frugal], 250_000);
}

#[test]
fn every_mistake_is_found() {
    let with_strays = Scenario { num_tasks: 1, num_strays: 1, frugal: true, ..TIGHT };
    for (fault, scenario, found) in [
        (Fault::ToldWithTheFirstOwner, TIGHT, "changed under its users"),
        (Fault::ReusedOnceSent, TIGHT, "changed under its users"),
        (Fault::ReturnsNotTold, TIGHT, "are lost"),
        (Fault::DropsNotTold, Scenario { frugal: true, ..TIGHT }, "but not forgotten"),
        (Fault::CountedByWaitingSlots, with_strays, "are reserved where there are"),
        (Fault::ReservedInTwoSteps, Scenario { budget: 5, ..TWO }, "got reserved of"),
    ] {
        let wrong = explore(Scenario { fault: Some(fault), ..scenario }).unwrap_err();
        assert!(wrong.contains(found), "{fault:?}: {wrong}");
    }
}
