//! Memory for records that tells who still holds it, and who writes it too late.
#![expect(unsafe_code, reason = "memory is initialised byte by byte, by the engine")]

use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex};

/// What slots hold before anything is written.
pub(crate) const UNWRITTEN: u8 = 0xA5;

/// The slots of one read.
#[derive(Debug, Default)]
pub(crate) struct Board(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The memory of slots that the engine has dropped.
    returned: Vec<Option<Vec<MaybeUninit<u8>>>>,
    /// Slots whose address the engine knows and has not dropped.
    num_opened: usize,
    is_closed: bool,
    was_late: bool,
}

/// Memory for one record, which the board gets back when the engine drops it.
pub(crate) struct Slot {
    at: usize,
    memory: Vec<MaybeUninit<u8>>,
    is_opened: bool,
    board: Arc<Board>,
}

impl Board {
    /// A board, and a slot for each length.
    pub(crate) fn with_slots(lens: &[Option<usize>]) -> (Arc<Self>, Vec<Option<Slot>>) {
        let board = Arc::new(Self::default());
        board.0.lock().unwrap().returned.resize_with(lens.len(), || None);
        let slot = |(at, &len): (usize, &Option<usize>)| {
            let memory = vec![MaybeUninit::new(UNWRITTEN); len?];
            Some(Slot { at, memory, is_opened: false, board: Arc::clone(&board) })
        };
        let slots = lens.iter().enumerate().map(slot).collect();
        (board, slots)
    }

    /// From now on nothing may be written; returns whether nobody can.
    pub(crate) fn close(&self) -> bool {
        let mut state = self.0.lock().unwrap();
        state.is_closed = true;
        state.num_opened == 0
    }

    /// Whether a slot was opened after the board was closed.
    pub(crate) fn was_late(&self) -> bool {
        self.0.lock().unwrap().was_late
    }

    /// The bytes in the slot of record `at`, if the engine has dropped it.
    pub(crate) fn bytes(&self, at: usize) -> Option<Vec<u8>> {
        let state = self.0.lock().unwrap();
        let memory = state.returned.get(at)?.as_ref()?;
        // SAFETY: each byte was initialised by `with_slots`, and the engine writes only initialised
        // ones.
        Some(memory.iter().map(|byte| unsafe { byte.assume_init() }).collect())
    }
}

impl AsMut<[MaybeUninit<u8>]> for Slot {
    fn as_mut(&mut self) -> &mut [MaybeUninit<u8>] {
        let mut state = self.board.0.lock().unwrap();
        state.num_opened += usize::from(!self.is_opened);
        state.was_late |= state.is_closed;
        self.is_opened = true;
        &mut self.memory
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut state = self.board.0.lock().unwrap();
        state.num_opened -= usize::from(self.is_opened);
        state.returned[self.at] = Some(std::mem::take(&mut self.memory));
    }
}
