//! The state machine of a transposed chunk: which tokens follow which, in few bytes.
//!
//! A token with a single successor stores it and needs no transition. Any other token has a list
//! of successors, of which one byte selects one; the most frequent is first, since four
//! transitions to the front of a list share a byte. Rare successors of a token are reached
//! through a list that all tokens share. A list of more than 64 becomes a tree.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// How many states one byte can reach.
const FAN_OUT: usize = 64;
/// A successor with this many transitions or more is in its token's own list.
const MIN_OWN_COUNT: u64 = 10;
const NONE: u32 = u32::MAX;

/// One state.
#[derive(Debug, Clone, Copy)]
pub struct State {
    /// Its token; `None` for the inner nodes of a tree.
    pub token: Option<u32>,
    /// As stored: the base of a list, or the number of states plus the only successor.
    pub next: u32,
}

/// A state machine and the transitions for which it emits a trace.
#[derive(Debug)]
pub struct StateMachine {
    /// The states.
    pub states: Vec<State>,
    /// The first state.
    pub first: u32,
    /// The transition bytes.
    pub transitions: Vec<u8>,
}

/// The machine that emits the tokens of `trace`, which are below `num_tokens`.
pub fn machine(trace: Vec<u32>, num_tokens: usize) -> StateMachine {
    let (Some(&first), Some(&last)) = (trace.first(), trace.last()) else {
        let states = vec![State { token: None, next: 0 }];
        return StateMachine { states, first: 0, transitions: Vec::new() };
    };
    let Edges { mut edges, walk } = Edges::of(trace, num_tokens);
    let mut layout = Layout::new(num_tokens);
    layout.plan(&mut edges, last);
    layout.place_remaining(&edges, first);
    let transitions = layout.transitions(&edges, &walk);
    let first = layout.state_of[first as usize];
    StateMachine { states: layout.states(), first, transitions }
}

/// How often one token follows another.
#[derive(Debug, Clone)]
struct Edge {
    from: u32,
    to: u32,
    count: u64,
    /// The offsets to select in the token's own list.
    path: Vec<u8>,
    /// Whether they lead to the shared list, where the path continues.
    shared: bool,
}

struct Edges {
    edges: Vec<Edge>,
    /// The trace as numbers of edges.
    walk: Vec<u32>,
}

impl Edges {
    fn of(mut trace: Vec<u32>, num_tokens: usize) -> Self {
        let mut edges: Vec<Edge> = Vec::new();
        let mut known: HashMap<(u32, u32), u32> = HashMap::new();
        // The edge that was taken last from each token is likely to be taken again.
        let mut likely = vec![NONE; num_tokens];
        for at in 1..trace.len() {
            let (from, to) = (trace[at - 1], trace[at]);
            let mut edge = likely[from as usize];
            if edges.get(edge as usize).is_none_or(|edge| edge.to != to) {
                edge = *known.entry((from, to)).or_insert_with(|| {
                    edges.push(Edge { from, to, count: 0, path: Vec::new(), shared: false });
                    number(edges.len() - 1)
                });
                likely[from as usize] = edge;
            }
            edges[edge as usize].count += 1;
            trace[at - 1] = edge;
        }
        trace.pop();
        Self { edges, walk: trace }
    }
}

/// The successors of a token.
#[derive(Clone, Copy)]
enum Next {
    /// Always this token.
    Only(u32),
    /// Those in the list at this state, of which a transition selects one.
    List(u32),
}

struct Layout {
    /// The token of each state and, for inner nodes of trees, the base of the child list.
    placed: Vec<(Option<u32>, u32)>,
    /// One state of each token.
    state_of: Vec<u32>,
    next: Vec<Next>,
    /// The offsets to each token in the shared list.
    shared_paths: Vec<Vec<u8>>,
}

impl Layout {
    fn new(num_tokens: usize) -> Self {
        Self {
            placed: Vec::new(),
            state_of: vec![NONE; num_tokens],
            next: vec![Next::List(0); num_tokens],
            shared_paths: vec![Vec::new(); num_tokens],
        }
    }

    /// Places the shared list, then the list of each token.
    fn plan(&mut self, edges: &mut [Edge], last: u32) {
        let mut order: Vec<usize> = (0..edges.len()).collect();
        order.sort_by_key(|&at| (edges[at].from, Reverse(edges[at].count), edges[at].to));
        let groups: Vec<&[usize]> =
            order.chunk_by(|&a, &b| edges[a].from == edges[b].from).collect();
        let mut weights = vec![0; self.next.len()];
        for group in &groups {
            let from = edges[group[0]].from;
            if group.len() == 1 && from != last {
                self.next[from as usize] = Next::Only(edges[group[0]].to);
                continue;
            }
            for &at in *group {
                let Edge { to, count, .. } = edges[at];
                if count < MIN_OWN_COUNT {
                    edges[at].shared = true;
                    weights[to as usize] += count;
                }
            }
        }
        self.place_shared(&weights);
        for group in groups {
            let from = edges[group[0]].from as usize;
            if matches!(self.next[from], Next::List(_)) {
                self.next[from] = Next::List(self.place_own(edges, group));
            }
        }
    }

    fn place_shared(&mut self, weights: &[u64]) {
        let leaves: Vec<(u64, u32)> = (0..)
            .zip(weights)
            .filter(|&(_, &weight)| weight > 0)
            .map(|(token, &weight)| (weight, token))
            .collect();
        if leaves.is_empty() {
            return;
        }
        let mut paths = vec![Vec::new(); leaves.len()];
        let list: Vec<(u64, Target)> =
            leaves.iter().map(|&(weight, token)| (weight, Target::Token(token))).collect();
        self.place(&list, &mut paths);
        for ((_, token), path) in leaves.iter().zip(paths) {
            self.shared_paths[*token as usize] = path;
        }
    }

    /// Places the list of one token, whose edges are `group`; the shared list begins at 0.
    fn place_own(&mut self, edges: &mut [Edge], group: &[usize]) -> u32 {
        let own: Vec<usize> = group.iter().copied().filter(|&at| !edges[at].shared).collect();
        if own.is_empty() {
            return 0;
        }
        let mut list: Vec<(u64, Target)> =
            own.iter().map(|&at| (edges[at].count, Target::Token(edges[at].to))).collect();
        let rare: Vec<usize> = group.iter().copied().filter(|&at| edges[at].shared).collect();
        if !rare.is_empty() {
            list.push((rare.iter().map(|&at| edges[at].count).sum(), Target::Shared));
        }
        let mut paths = vec![Vec::new(); list.len()];
        let base = self.place(&list, &mut paths);
        if !rare.is_empty() {
            let to_shared = paths.pop().unwrap_or_default();
            for at in rare {
                edges[at].path.clone_from(&to_shared);
            }
        }
        for (at, path) in own.into_iter().zip(paths) {
            edges[at].path = path;
        }
        base
    }

    /// Adds a state for every token that is in no list.
    fn place_remaining(&mut self, edges: &[Edge], first: u32) {
        for token in std::iter::once(first).chain(edges.iter().map(|edge| edge.to)) {
            if self.state_of[token as usize] == NONE {
                self.state_of[token as usize] = number(self.placed.len());
                self.placed.push((Some(token), 0));
            }
        }
    }

    /// Places a list with the given weights; returns its base and sets the paths.
    fn place(&mut self, list: &[(u64, Target)], paths: &mut [Vec<u8>]) -> u32 {
        let root = Tree::of(list);
        self.place_tree(root, list, &mut Vec::new(), paths)
    }

    fn place_tree(
        &mut self,
        children: Vec<Tree>,
        list: &[(u64, Target)],
        path: &mut Vec<u8>,
        paths: &mut [Vec<u8>],
    ) -> u32 {
        let base = self.placed.len();
        self.placed.resize(base + children.len(), (None, 0));
        for (offset, child) in (0..).zip(children) {
            path.push(offset);
            let state = base + usize::from(offset);
            match child {
                Tree::Inner(children) => {
                    let child_base = self.place_tree(children, list, path, paths);
                    self.placed[state] = (None, child_base);
                }
                Tree::Leaf(at) => {
                    paths[at].clone_from(path);
                    if let Target::Token(token) = list[at].1 {
                        self.placed[state] = (Some(token), 0);
                        self.state_of[token as usize] = number(state);
                    }
                }
            }
            path.pop();
        }
        number(base)
    }

    fn transitions(&self, edges: &[Edge], walk: &[u32]) -> Vec<u8> {
        let mut transitions = Vec::new();
        for edge in walk.iter().map(|&edge| &edges[edge as usize]) {
            if matches!(self.next[edge.from as usize], Next::Only(_)) {
                continue;
            }
            let shared: &[u8] =
                if edge.shared { &self.shared_paths[edge.to as usize] } else { &[] };
            for &offset in edge.path.iter().chain(shared) {
                push_transition(&mut transitions, offset);
            }
        }
        transitions
    }

    fn states(&self) -> Vec<State> {
        let num_states = number(self.placed.len());
        let next = |token: u32| match self.next[token as usize] {
            Next::Only(successor) => num_states + self.state_of[successor as usize],
            Next::List(base) => base,
        };
        let state =
            |&(token, base): &(Option<u32>, u32)| State { token, next: token.map_or(base, next) };
        self.placed.iter().map(state).collect()
    }
}

/// A byte encodes an offset of up to 63 states and up to three repeats with offset 0.
fn push_transition(transitions: &mut Vec<u8>, offset: u8) {
    match transitions.last_mut() {
        Some(byte) if offset == 0 && *byte & 3 < 3 => *byte += 1,
        _ => transitions.push(offset << 2),
    }
}

/// An entry of a list.
#[derive(Clone, Copy)]
enum Target {
    Token(u32),
    /// The shared list, whose base is 0.
    Shared,
}

/// A list of successors, at most [`FAN_OUT`] wide on each level.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Tree {
    Leaf(usize),
    Inner(Vec<Tree>),
}

impl Tree {
    /// The top level of the tree in which the leaves of `list` are reached in the fewest
    /// transitions (after Huffman), the most frequent first on every level.
    fn of(list: &[(u64, Target)]) -> Vec<Self> {
        let mut heap: BinaryHeap<Reverse<(u64, Reverse<usize>, Self)>> = list
            .iter()
            .enumerate()
            .map(|(at, &(weight, _))| Reverse((weight, Reverse(at), Self::Leaf(at))))
            .collect();
        let take = |heap: &mut BinaryHeap<_>, len: usize| {
            let mut weight = 0;
            let mut children: Vec<Self> = Vec::with_capacity(len);
            while children.len() < len {
                let Some(Reverse((tree_weight, _, tree))) = heap.pop() else { break };
                weight += tree_weight;
                children.push(tree);
            }
            children.reverse();
            (weight, children)
        };
        // The first inner node gets the remainder, so that all others are full.
        let mut len = 2 + list.len().saturating_sub(2) % (FAN_OUT - 1);
        let mut order = list.len();
        while heap.len() > FAN_OUT {
            let (weight, children) = take(&mut heap, len);
            heap.push(Reverse((weight, Reverse(order), Self::Inner(children))));
            order += 1;
            len = FAN_OUT;
        }
        let all = heap.len();
        take(&mut heap, all).1
    }
}

/// A number of states or edges: each has at least one byte of a chunk.
fn number(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(NONE)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tokens of a machine, run as the format describes it.
    fn emitted(machine: &StateMachine) -> Vec<u32> {
        let num_states = number(machine.states.len());
        let (mut state, mut repeat, mut transitions) =
            (machine.first, 0, machine.transitions.iter());
        let mut tokens = Vec::new();
        loop {
            let State { token, next } = machine.states[state as usize];
            tokens.extend(token);
            if next >= num_states {
                state = next - num_states;
            } else if repeat > 0 {
                repeat -= 1;
                state = next;
            } else if let Some(&byte) = transitions.next() {
                state = next + u32::from(byte >> 2);
                repeat = byte & 3;
            } else {
                return tokens;
            }
        }
    }

    fn check(trace: &[u32]) -> StateMachine {
        let num_tokens = trace.iter().max().map_or(0, |&max| max as usize + 1);
        let machine = machine(trace.to_vec(), num_tokens);
        assert_eq!(emitted(&machine), trace);
        machine
    }

    #[test]
    fn a_periodic_trace_takes_a_quarter_byte_per_period() {
        let trace: Vec<u32> = (0..4000).map(|at| at % 10).collect();
        assert_eq!(check(&trace).transitions.len(), 100, "one of ten states needs a transition");
    }

    #[test]
    fn a_machine_without_tokens_has_no_transitions() {
        assert!(check(&[]).transitions.is_empty());
        assert!(check(&[0]).transitions.is_empty());
    }

    #[test]
    fn thousands_of_tokens_are_reached_through_a_tree() {
        let trace: Vec<u32> = (0..30_000_u32).map(|at| at * at % 4999 + at % 7).collect();
        check(&trace);
        let skewed: Vec<u32> = (0..60_000_u32).map(|at| at.trailing_zeros() + at % 151).collect();
        check(&skewed);
    }

    proptest::proptest! {
        #[test]
        fn any_trace_is_emitted(trace in proptest::collection::vec(0..90_u32, 0..1500)) {
            check(&trace);
        }
    }
}
