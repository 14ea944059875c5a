//! Huffman codes of a JPEG scan: tables that decode a code and its value in one look.

use super::bits::BitReader;

/// How many bits a look at a table takes; longer codes are rare.
const LOOK_BITS: u32 = 10;
/// How many bits one look takes where values are not needed.
const SKIP_BITS: u32 = 12;
/// What an entry advances by at the end of a block; more than any other.
pub(super) const END_OF_BLOCK: u32 = 64;

/// The tables of ITU-T T.81, annex K.3, which files without tables of their own use: for brightness and
/// for colour, counts of codes by length and their symbols.
const STANDARD_DC: [([u8; 16], &[u8]); 2] = [
    ([0, 1, 5, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0], &DC_SYMBOLS),
    ([0, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0], &DC_SYMBOLS),
];
const STANDARD_AC: [([u8; 16], &[u8]); 2] = [
    ([0, 2, 1, 3, 3, 2, 4, 3, 5, 5, 4, 4, 0, 0, 1, 125], &AC_SYMBOLS_OF_BRIGHTNESS),
    ([0, 2, 1, 2, 4, 4, 3, 4, 7, 5, 4, 4, 0, 1, 2, 119], &AC_SYMBOLS_OF_COLOUR),
];

const DC_SYMBOLS: [u8; 12] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11];
#[rustfmt::skip]
const AC_SYMBOLS_OF_BRIGHTNESS: [u8; 162] = [
    0x01, 0x02, 0x03, 0x00, 0x04, 0x11, 0x05, 0x12, 0x21, 0x31, 0x41, 0x06, 0x13, 0x51, 0x61, 0x07,
    0x22, 0x71, 0x14, 0x32, 0x81, 0x91, 0xa1, 0x08, 0x23, 0x42, 0xb1, 0xc1, 0x15, 0x52, 0xd1, 0xf0,
    0x24, 0x33, 0x62, 0x72, 0x82, 0x09, 0x0a, 0x16, 0x17, 0x18, 0x19, 0x1a, 0x25, 0x26, 0x27, 0x28,
    0x29, 0x2a, 0x34, 0x35, 0x36, 0x37, 0x38, 0x39, 0x3a, 0x43, 0x44, 0x45, 0x46, 0x47, 0x48, 0x49,
    0x4a, 0x53, 0x54, 0x55, 0x56, 0x57, 0x58, 0x59, 0x5a, 0x63, 0x64, 0x65, 0x66, 0x67, 0x68, 0x69,
    0x6a, 0x73, 0x74, 0x75, 0x76, 0x77, 0x78, 0x79, 0x7a, 0x83, 0x84, 0x85, 0x86, 0x87, 0x88, 0x89,
    0x8a, 0x92, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99, 0x9a, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7,
    0xa8, 0xa9, 0xaa, 0xb2, 0xb3, 0xb4, 0xb5, 0xb6, 0xb7, 0xb8, 0xb9, 0xba, 0xc2, 0xc3, 0xc4, 0xc5,
    0xc6, 0xc7, 0xc8, 0xc9, 0xca, 0xd2, 0xd3, 0xd4, 0xd5, 0xd6, 0xd7, 0xd8, 0xd9, 0xda, 0xe1, 0xe2,
    0xe3, 0xe4, 0xe5, 0xe6, 0xe7, 0xe8, 0xe9, 0xea, 0xf1, 0xf2, 0xf3, 0xf4, 0xf5, 0xf6, 0xf7, 0xf8,
    0xf9, 0xfa,
];
#[rustfmt::skip]
const AC_SYMBOLS_OF_COLOUR: [u8; 162] = [
    0x00, 0x01, 0x02, 0x03, 0x11, 0x04, 0x05, 0x21, 0x31, 0x06, 0x12, 0x41, 0x51, 0x07, 0x61, 0x71,
    0x13, 0x22, 0x32, 0x81, 0x08, 0x14, 0x42, 0x91, 0xa1, 0xb1, 0xc1, 0x09, 0x23, 0x33, 0x52, 0xf0,
    0x15, 0x62, 0x72, 0xd1, 0x0a, 0x16, 0x24, 0x34, 0xe1, 0x25, 0xf1, 0x17, 0x18, 0x19, 0x1a, 0x26,
    0x27, 0x28, 0x29, 0x2a, 0x35, 0x36, 0x37, 0x38, 0x39, 0x3a, 0x43, 0x44, 0x45, 0x46, 0x47, 0x48,
    0x49, 0x4a, 0x53, 0x54, 0x55, 0x56, 0x57, 0x58, 0x59, 0x5a, 0x63, 0x64, 0x65, 0x66, 0x67, 0x68,
    0x69, 0x6a, 0x73, 0x74, 0x75, 0x76, 0x77, 0x78, 0x79, 0x7a, 0x82, 0x83, 0x84, 0x85, 0x86, 0x87,
    0x88, 0x89, 0x8a, 0x92, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99, 0x9a, 0xa2, 0xa3, 0xa4, 0xa5,
    0xa6, 0xa7, 0xa8, 0xa9, 0xaa, 0xb2, 0xb3, 0xb4, 0xb5, 0xb6, 0xb7, 0xb8, 0xb9, 0xba, 0xc2, 0xc3,
    0xc4, 0xc5, 0xc6, 0xc7, 0xc8, 0xc9, 0xca, 0xd2, 0xd3, 0xd4, 0xd5, 0xd6, 0xd7, 0xd8, 0xd9, 0xda,
    0xe2, 0xe3, 0xe4, 0xe5, 0xe6, 0xe7, 0xe8, 0xe9, 0xea, 0xf2, 0xf3, 0xf4, 0xf5, 0xf6, 0xf7, 0xf8,
    0xf9, 0xfa,
];

/// What a code stands for.
#[derive(Clone, Copy)]
pub(super) struct Symbol {
    /// The length of the code, and of the value where the entry contains it; 0 if there is none.
    pub(super) len: u32,
    /// How far it moves through the block; [`END_OF_BLOCK`] for its end.
    pub(super) advance: u32,
    /// How many bits of value follow; 0 if there are none, or the entry contains them.
    pub(super) size: u32,
    /// The value; for the end of a block, the exponent of the number of blocks that end.
    pub(super) value: i32,
}

/// A [`Symbol`] in 32 bits: length 6, advance 7, size 4, value 15; 0 if no short code fits.
#[derive(Clone, Copy, Default)]
struct Entry(u32);

impl Entry {
    #[expect(clippy::cast_sign_loss, reason = "the bits of a signed value")]
    fn new(symbol: Symbol) -> Self {
        Self(symbol.len | symbol.advance << 6 | symbol.size << 13 | (symbol.value as u32) << 17)
    }

    #[inline(always)]
    #[expect(clippy::cast_possible_wrap, reason = "the bits of a signed value")]
    fn symbol(self) -> Symbol {
        Symbol {
            len: self.0 & 63,
            advance: self.0 >> 6 & 127,
            size: self.0 >> 13 & 15,
            value: self.0 as i32 >> 17,
        }
    }
}

/// Several symbols at once, without their values: how many bits they take, how far they move through
/// the block, and whether the last ends it.
#[derive(Clone, Copy, Default)]
struct Run(u16);

impl Run {
    fn new(len: u32, advance: u32, ends: bool) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "12 bits of at most 16 each")]
        Self((len | u32::from(ends) << 4 | advance << 5) as u16)
    }

    #[inline(always)]
    fn parts(self) -> (u32, u32, bool) {
        let bits = u32::from(self.0);
        (bits & 15, bits >> 5, bits & 16 != 0)
    }
}

/// Which kind of coefficient a table's symbols describe.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Sizes of differences.
    Dc,
    /// Runs of zeros and sizes of values.
    Ac,
}

/// The codes of one table.
pub(super) struct Table {
    kind: Kind,
    looks: Box<[Entry; 1 << LOOK_BITS]>,
    /// For each length the first code that is longer, aligned to 16 bits.
    limits: [u32; 17],
    /// For each length, the index of a code's symbol less the code.
    offsets: [i32; 17],
    symbols: Vec<u8>,
    runs: Option<Box<[Run; 1 << SKIP_BITS]>>,
}

impl Table {
    /// The table of `counts` codes of each length from 1, and their `symbols` in order.
    pub(super) fn new(kind: Kind, counts: &[u8; 16], symbols: &[u8]) -> Result<Self, String> {
        let total: usize = counts.iter().map(|&count| usize::from(count)).sum();
        if total != symbols.len() || total > 256 {
            return Err(format!("a Huffman table has {total} codes"));
        }
        if kind == Kind::Dc && symbols.iter().any(|&symbol| symbol > 15) {
            return Err("a Huffman table has a difference of more than 15 bits".into());
        }
        let mut table = Self {
            kind,
            looks: Box::new([Entry::default(); 1 << LOOK_BITS]),
            limits: [0; 17],
            offsets: [0; 17],
            symbols: symbols.to_vec(),
            runs: None,
        };
        let (mut code, mut index) = (0_u32, 0_u32);
        for len in 1..=16_u32 {
            let count = u32::from(counts[len as usize - 1]);
            #[expect(clippy::cast_possible_wrap, reason = "at most 16 bits")]
            let offset = index as i32 - code as i32;
            table.offsets[len as usize] = offset;
            if code + count > 1 << len {
                return Err(format!("a Huffman table has too many codes of {len} bits"));
            }
            for _ in 0..count {
                table.fill(code, len, symbols[index as usize]);
                code += 1;
                index += 1;
            }
            table.limits[len as usize] = code << (16 - len);
            code <<= 1;
        }
        Ok(table)
    }

    /// Table `number` of the standard's, if it has one.
    pub(super) fn standard(kind: Kind, number: usize) -> Option<Self> {
        let tables = if kind == Kind::Dc { &STANDARD_DC } else { &STANDARD_AC };
        let (counts, symbols) = tables.get(number)?;
        Self::new(kind, counts, symbols).ok()
    }

    /// Fills the entries of all looks that begin with `code`.
    fn fill(&mut self, code: u32, len: u32, symbol: u8) {
        if len > LOOK_BITS {
            return;
        }
        let free = LOOK_BITS - len;
        let plain = self.meaning(symbol, len);
        for rest in 0..1_u32 << free {
            let mut symbol = plain;
            if symbol.size > 0 && symbol.size <= free {
                symbol.value = extend(rest >> (free - symbol.size), symbol.size);
                symbol.len += symbol.size;
                symbol.size = 0;
            }
            self.looks[(code << free | rest) as usize] = Entry::new(symbol);
        }
    }

    /// What the symbol of a code of `len` bits means.
    fn meaning(&self, symbol: u8, len: u32) -> Symbol {
        let (run, size) = (u32::from(symbol >> 4), u32::from(symbol & 15));
        match self.kind {
            Kind::Dc => Symbol { len, advance: 0, size: u32::from(symbol), value: 0 },
            Kind::Ac if size == 0 && run < 15 =>
            {
                #[expect(clippy::cast_possible_wrap, reason = "below 15")]
                Symbol { len, advance: END_OF_BLOCK, size: 0, value: run as i32 }
            }
            Kind::Ac => Symbol { len, advance: run + 1, size, value: 0 },
        }
    }

    /// The next symbol, whose code and contained value are consumed; its length is 0 if no code
    /// matches. `bits` must hold at least 16.
    #[inline(always)]
    pub(super) fn next(&self, bits: &mut BitReader) -> Symbol {
        let mut entry = self.looks[bits.peek(LOOK_BITS) as usize];
        if entry.0 == 0 {
            entry = self.long(bits.peek(16));
        }
        let symbol = entry.symbol();
        bits.consume(symbol.len);
        symbol
    }

    /// The entry for a code that is longer than a look, if any. It is given bits, not their reader,
    /// so that this stays in registers.
    #[cold]
    #[inline(never)]
    fn long(&self, code: u32) -> Entry {
        let found = (1..=16_u32).find(|&len| code < self.limits[len as usize]);
        let symbol = found.and_then(|len| {
            #[expect(clippy::cast_possible_wrap, reason = "at most 16 bits")]
            let index = (code >> (16 - len)) as i32 + self.offsets[len as usize];
            let symbol = *self.symbols.get(usize::try_from(index).ok()?)?;
            Some(self.meaning(symbol, len))
        });
        symbol.map_or(Entry::default(), Entry::new)
    }

    /// Prepares [`Table::skip_block`].
    pub(super) fn prepare_skipping(&mut self) {
        if self.runs.is_some() {
            return;
        }
        let mut runs = Box::new([Run::default(); 1 << SKIP_BITS]);
        for (bits, run) in (0_u32..).zip(runs.iter_mut()) {
            let (mut used, mut advance, mut ends) = (0, 0, false);
            while used < SKIP_BITS && !ends {
                let rest = bits << used & ((1 << SKIP_BITS) - 1);
                let symbol = self.looks[(rest >> (SKIP_BITS - LOOK_BITS)) as usize].symbol();
                let len = symbol.len + symbol.size;
                // A code is known only if all of its bits are.
                if symbol.len == 0 || used + len > SKIP_BITS {
                    break;
                }
                used += len;
                ends = symbol.advance == END_OF_BLOCK;
                if !ends {
                    advance += symbol.advance;
                }
            }
            *run = Run::new(used, advance, ends);
        }
        self.runs = Some(runs);
    }

    /// Consumes the AC coefficients of one block; `None` if they are invalid.
    #[inline(always)]
    pub(super) fn skip_block(&self, bits: &mut BitReader) -> Option<()> {
        let Some(runs) = &self.runs else { return self.skip_rest(bits, 0) };
        let mut at = 0;
        while at < 63 {
            bits.refill_to(32);
            let (len, advance, ends) = runs[bits.peek(SKIP_BITS) as usize].parts();
            let to = at + advance;
            // A run that crosses the end of the block contains codes of the next one.
            if len == 0 || to > 63 - u32::from(ends) {
                return self.skip_rest(bits, at);
            }
            bits.consume(len);
            if ends {
                return Some(());
            }
            at = to;
        }
        Some(())
    }

    #[inline(always)]
    fn skip_rest(&self, bits: &mut BitReader, at: u32) -> Option<()> {
        *bits = self.skip_slowly(*bits, at)?;
        Some(())
    }

    /// Consumes coefficients one by one; takes the reader as a value, so that it stays in registers
    /// elsewhere.
    #[inline(never)]
    fn skip_slowly<'a>(&self, mut bits: BitReader<'a>, mut at: u32) -> Option<BitReader<'a>> {
        while at < 63 {
            bits.refill_to(32);
            let symbol = self.next(&mut bits);
            if symbol.len == 0 {
                return None;
            }
            bits.consume(symbol.size);
            if symbol.advance == END_OF_BLOCK {
                return Some(bits);
            }
            at += symbol.advance;
        }
        (at == 63).then_some(bits)
    }
}

/// The value that `size` bits stand for: the upper half of the range is positive.
#[inline(always)]
#[expect(clippy::cast_possible_wrap, reason = "at most 16 bits")]
pub(super) fn extend(bits: u32, size: u32) -> i32 {
    let value = bits as i32;
    if size > 0 && bits >> (size - 1) == 0 { value - (1 << size) + 1 } else { value }
}
