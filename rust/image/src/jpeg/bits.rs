//! The bits of a scan, once stuffed bytes and restart markers are removed.

/// The entropy-coded bytes of one scan.
pub(super) struct EntropyData {
    /// Without stuffing; each segment is followed by zeros.
    bytes: Vec<u8>,
    /// Where each segment between restart markers starts and ends.
    segments: Vec<(usize, usize)>,
    /// Where the marker is that ends the scan, in the file; `None` if the file ends first.
    pub(super) end: Option<usize>,
}

/// Zeros after a segment: a reader that has passed its end is found out after one MCU at the latest.
const PADDING: usize = 16;

impl EntropyData {
    /// The data of a scan that starts at `start`; `None` if it does not fit into memory.
    pub(super) fn new(file: &[u8], start: usize) -> Option<Self> {
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(file.len() - start + PADDING).ok()?;
        let (mut segments, mut segment_start) = (Vec::new(), 0);
        let (mut at, mut end) = (start, None);
        loop {
            let Some(len) = find_ff(&file[at..]) else {
                bytes.extend_from_slice(&file[at..]);
                break;
            };
            bytes.extend_from_slice(&file[at..at + len]);
            at += len;
            match file.get(at + 1) {
                Some(0) => bytes.push(0xff),
                Some(0xd0..=0xd7) => {
                    segments.push((segment_start, bytes.len()));
                    bytes.extend_from_slice(&[0; PADDING]);
                    segment_start = bytes.len();
                }
                // A fill byte: the marker is still to come.
                Some(0xff) => {
                    at += 1;
                    continue;
                }
                Some(_) => {
                    end = Some(at);
                    break;
                }
                None => break,
            }
            at += 2;
        }
        segments.push((segment_start, bytes.len()));
        bytes.extend_from_slice(&[0; PADDING]);
        Some(Self { bytes, segments, end })
    }

    /// A reader of segment `index`; `None` if there is none.
    pub(super) fn reader(&self, index: usize) -> Option<BitReader<'_>> {
        let &(start, end) = self.segments.get(index)?;
        Some(BitReader { bytes: &self.bytes, pos: start, end, bits: 0, len: 0 })
    }
}

/// The position of the first 0xFF.
fn find_ff(bytes: &[u8]) -> Option<usize> {
    const ONES: u64 = 0x0101_0101_0101_0101;
    let words = bytes.chunks_exact(8);
    let tail = words.remainder();
    let start_of_tail = bytes.len() - tail.len();
    for (index, word) in words.enumerate() {
        // A byte is 0xFF if its complement is zero.
        let word = !u64::from_le_bytes(word.try_into().expect("eight bytes"));
        let zeros = word.wrapping_sub(ONES) & !word & (ONES << 7);
        if zeros != 0 {
            return Some(8 * index + zeros.trailing_zeros() as usize / 8);
        }
    }
    tail.iter().position(|&byte| byte == 0xff).map(|at| start_of_tail + at)
}

/// Reads bits, the highest of each byte first; zeros after the end.
#[derive(Clone, Copy)]
pub(super) struct BitReader<'a> {
    bytes: &'a [u8],
    /// The next byte to load.
    pos: usize,
    end: usize,
    /// Loaded bits, the next one on top.
    bits: u64,
    len: u32,
}

impl BitReader<'_> {
    /// Loads bytes unless `len` bits, at most 56, are loaded.
    #[inline(always)]
    pub(super) fn refill_to(&mut self, len: u32) {
        if self.len < len {
            let word = match self.bytes.get(self.pos..self.pos + 8) {
                Some(bytes) => u64::from_be_bytes(bytes.try_into().expect("eight bytes")),
                None => 0,
            };
            self.bits |= word >> self.len;
            self.pos += (63 - self.len as usize) >> 3;
            // The number of whole bytes' bits that fit, 56 to 63.
            self.len |= 0x38;
        }
    }

    /// The next `len` bits, from 1 to 32, which must be loaded.
    #[inline(always)]
    pub(super) fn peek(&self, len: u32) -> u32 {
        #[expect(clippy::cast_possible_truncation, reason = "at most 32 bits")]
        let bits = (self.bits >> (64 - len)) as u32;
        bits
    }

    /// Consumes `len` loaded bits.
    #[inline(always)]
    pub(super) fn consume(&mut self, len: u32) {
        self.bits <<= len;
        self.len -= len;
    }

    /// Consumes and returns the next `len` bits, at most 16, which must be loaded.
    #[inline(always)]
    pub(super) fn take(&mut self, len: u32) -> u32 {
        if len == 0 {
            return 0;
        }
        let bits = self.peek(len);
        self.consume(len);
        bits
    }

    /// Whether more bits were consumed than there are.
    #[inline(always)]
    pub(super) fn is_past_end(&self) -> bool {
        8 * self.pos - self.len as usize > 8 * self.end
    }
}
