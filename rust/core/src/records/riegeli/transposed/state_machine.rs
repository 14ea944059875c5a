//! The state machine of a transposed chunk: which tokens follow which, in few bytes.
//!
//! A token with a single successor names it and costs nothing. Any other token has a list
//! of successors, of which one byte picks one; the most frequent one comes first, since four
//! moves to the front of a list share a byte. Successors that are rare for a token are found
//! over a list that all tokens share. A list of more than 64 becomes a tree.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// How many states one byte can reach.
const FAN_OUT: usize = 64;
/// From this many moves on, a successor has a place in its token's own list.
const OFTEN: u64 = 10;
const NONE: u32 = u32::MAX;

/// One state.
#[derive(Debug, Clone, Copy)]
pub struct State {
    /// What it does; nothing in the inner nodes of a tree.
    pub token: Option<u32>,
    /// As stored: a base, or the number of states plus the only successor.
    pub next: u32,
}

/// A state machine and the moves that make it repeat a trace.
#[derive(Debug)]
pub struct StateMachine {
    /// The states.
    pub states: Vec<State>,
    /// Where it begins.
    pub first: u32,
    /// The transition bytes.
    pub moves: Vec<u8>,
}

/// The machine that performs the tokens of `trace`, numbers below `num_tokens`.
pub fn machine(trace: Vec<u32>, num_tokens: usize) -> StateMachine {
    let (Some(&first), Some(&last)) = (trace.first(), trace.last()) else {
        let states = vec![State { token: None, next: 0 }];
        return StateMachine { states, first: 0, moves: Vec::new() };
    };
    let Edges { mut edges, walk } = Edges::of(trace, num_tokens);
    let mut layout = Layout::new(num_tokens);
    layout.plan(&mut edges, last);
    layout.place_lone(&edges, first);
    let moves = layout.moves(&edges, &walk);
    let first = layout.row_of[first as usize];
    StateMachine { states: layout.states(), first, moves }
}

/// How often one token follows another.
#[derive(Debug, Clone)]
struct Edge {
    from: u32,
    to: u32,
    count: u64,
    /// The offsets to choose in the token's own list.
    path: Vec<u8>,
    /// Whether they lead to the shared list, where the way goes on.
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

/// What follows a token.
#[derive(Clone, Copy)]
enum Next {
    /// Always this token.
    Only(u32),
    /// What the moves pick from the list that begins at this state.
    List(u32),
}

struct Layout {
    /// The token of each state and, for inner nodes of trees, the base of the list below.
    rows: Vec<(Option<u32>, u32)>,
    /// A state of each token.
    row_of: Vec<u32>,
    next: Vec<Next>,
    /// The offsets to each token in the shared list.
    shared_paths: Vec<Vec<u8>>,
}

impl Layout {
    fn new(num_tokens: usize) -> Self {
        Self {
            rows: Vec::new(),
            row_of: vec![NONE; num_tokens],
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
                if count < OFTEN {
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
        let list: Vec<(u64, Leaf)> =
            leaves.iter().map(|&(weight, token)| (weight, Leaf::Token(token))).collect();
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
        let mut list: Vec<(u64, Leaf)> =
            own.iter().map(|&at| (edges[at].count, Leaf::Token(edges[at].to))).collect();
        let rare: Vec<usize> = group.iter().copied().filter(|&at| edges[at].shared).collect();
        if !rare.is_empty() {
            list.push((rare.iter().map(|&at| edges[at].count).sum(), Leaf::Shared));
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

    /// Gives a state to every token that no list has placed.
    fn place_lone(&mut self, edges: &[Edge], first: u32) {
        for token in std::iter::once(first).chain(edges.iter().map(|edge| edge.to)) {
            if self.row_of[token as usize] == NONE {
                self.row_of[token as usize] = number(self.rows.len());
                self.rows.push((Some(token), 0));
            }
        }
    }

    /// Places a list with the given weights; returns its base and fills in the offsets.
    fn place(&mut self, list: &[(u64, Leaf)], paths: &mut [Vec<u8>]) -> u32 {
        let root = Tree::of(list);
        self.place_tree(root, list, &mut Vec::new(), paths)
    }

    fn place_tree(
        &mut self,
        children: Vec<Tree>,
        list: &[(u64, Leaf)],
        way: &mut Vec<u8>,
        paths: &mut [Vec<u8>],
    ) -> u32 {
        let base = self.rows.len();
        self.rows.resize(base + children.len(), (None, 0));
        for (offset, child) in (0..).zip(children) {
            way.push(offset);
            let row = base + usize::from(offset);
            match child {
                Tree::Inner(below) => {
                    let below = self.place_tree(below, list, way, paths);
                    self.rows[row] = (None, below);
                }
                Tree::Leaf(at) => {
                    paths[at].clone_from(way);
                    if let Leaf::Token(token) = list[at].1 {
                        self.rows[row] = (Some(token), 0);
                        self.row_of[token as usize] = number(row);
                    }
                }
            }
            way.pop();
        }
        number(base)
    }

    fn moves(&self, edges: &[Edge], walk: &[u32]) -> Vec<u8> {
        let mut moves = Vec::new();
        for edge in walk.iter().map(|&edge| &edges[edge as usize]) {
            if matches!(self.next[edge.from as usize], Next::Only(_)) {
                continue;
            }
            let shared: &[u8] =
                if edge.shared { &self.shared_paths[edge.to as usize] } else { &[] };
            for &offset in edge.path.iter().chain(shared) {
                push_move(&mut moves, offset);
            }
        }
        moves
    }

    fn states(&self) -> Vec<State> {
        let num_states = number(self.rows.len());
        let next = |token: u32| match self.next[token as usize] {
            Next::Only(successor) => num_states + self.row_of[successor as usize],
            Next::List(base) => base,
        };
        let state =
            |&(token, below): &(Option<u32>, u32)| State { token, next: token.map_or(below, next) };
        self.rows.iter().map(state).collect()
    }
}

/// A byte moves up to 63 states ahead, then stands for up to three moves to the front.
fn push_move(moves: &mut Vec<u8>, offset: u8) {
    match moves.last_mut() {
        Some(byte) if offset == 0 && *byte & 3 < 3 => *byte += 1,
        _ => moves.push(offset << 2),
    }
}

/// What a list leads to.
#[derive(Clone, Copy)]
enum Leaf {
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
    /// moves (after Huffman), the most frequent first on every level.
    fn of(list: &[(u64, Leaf)]) -> Vec<Self> {
        let mut heap: BinaryHeap<Reverse<(u64, Reverse<usize>, Self)>> = list
            .iter()
            .enumerate()
            .map(|(at, &(weight, _))| Reverse((weight, Reverse(at), Self::Leaf(at))))
            .collect();
        let take = |heap: &mut BinaryHeap<_>, len: usize| {
            let mut weight = 0;
            let mut children: Vec<Self> = Vec::with_capacity(len);
            while children.len() < len {
                let Some(Reverse((one, _, tree))) = heap.pop() else { break };
                weight += one;
                children.push(tree);
            }
            children.reverse();
            (weight, children)
        };
        // The first inner node is filled so that all others come out full.
        let mut len = 2 + list.len().saturating_sub(2) % (FAN_OUT - 1);
        let mut age = list.len();
        while heap.len() > FAN_OUT {
            let (weight, children) = take(&mut heap, len);
            heap.push(Reverse((weight, Reverse(age), Self::Inner(children))));
            age += 1;
            len = FAN_OUT;
        }
        let all = heap.len();
        take(&mut heap, all).1
    }
}

/// A number of states or edges: each stands for a byte or more of one chunk.
fn number(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(NONE)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a machine as the format describes it.
    fn performed(machine: &StateMachine) -> Vec<u32> {
        let num_states = number(machine.states.len());
        let (mut state, mut repeat, mut moves) = (machine.first, 0, machine.moves.iter());
        let mut tokens = Vec::new();
        loop {
            let State { token, next } = machine.states[state as usize];
            tokens.extend(token);
            if next >= num_states {
                state = next - num_states;
            } else if repeat > 0 {
                repeat -= 1;
                state = next;
            } else if let Some(&byte) = moves.next() {
                state = next + u32::from(byte >> 2);
                repeat = byte & 3;
            } else {
                return tokens;
            }
        }
    }

    fn check(trace: &[u32]) -> StateMachine {
        let num_tokens = trace.iter().max().map_or(0, |&most| most as usize + 1);
        let machine = machine(trace.to_vec(), num_tokens);
        assert_eq!(performed(&machine), trace);
        machine
    }

    #[test]
    fn a_regular_trace_costs_a_quarter_byte_a_round() {
        let trace: Vec<u32> = (0..4000).map(|at| at % 10).collect();
        assert_eq!(check(&trace).moves.len(), 100, "one of ten states has to be told to go on");
    }

    #[test]
    fn a_machine_without_tokens_does_nothing() {
        assert!(check(&[]).moves.is_empty());
        assert!(check(&[0]).moves.is_empty());
    }

    #[test]
    fn thousands_of_tokens_are_reached_over_a_tree() {
        let trace: Vec<u32> = (0..30_000_u32).map(|at| at * at % 4999 + at % 7).collect();
        check(&trace);
        let skewed: Vec<u32> = (0..60_000_u32).map(|at| at.trailing_zeros() + at % 151).collect();
        check(&skewed);
    }

    proptest::proptest! {
        #[test]
        fn any_trace_is_performed(trace in proptest::collection::vec(0..90_u32, 0..1500)) {
            check(&trace);
        }
    }
}
