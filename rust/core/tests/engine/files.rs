//! The model: files as lists of records, and a format that reads them unit by unit.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use grainmill_core::formats::array_record::RecordWriter;
use grainmill_core::formats::checksum::highway;
use grainmill_core::formats::chunk_records::ChunkRecords;
use grainmill_core::formats::decode_scratch::{DecodeScratch, FormatScratch};
use grainmill_core::formats::format::OpenedFile;
use grainmill_core::formats::record_file::Pick;
use grainmill_core::formats::riegeli::chunk::CHUNK_HEADER_LEN;
use grainmill_core::formats::{ArrayRecord, Format, FormatError, RecordFile};
use grainmill_core::io::storage::{Reader, StoredFile};
use grainmill_core::io::storage_latency::StorageLatency;
use grainmill_core::read::{FileSet, Files, SourceFile};
use grainmill_core::{Error, Result};

use crate::random::Random;
use crate::storage::{Stored, TestStorage};

/// How far away a file is.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Place {
    /// Its reads never wait.
    Near,
    /// Half of them wait, which the engine has to find out.
    Turning,
    /// On another machine.
    Far,
}

/// What is wrong with a file.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fault {
    Nothing,
    /// It cannot be opened.
    Missing,
    /// It was changed after it had been opened.
    Changed,
    /// Every read of records fails.
    Always,
    /// One read of records does.
    Once(usize),
    /// One request is never answered.
    Forgets(usize),
}

/// A unit as it is drawn: how far after the begin of the last one it begins, or else where that ends;
/// its length, and those of its records.
#[derive(Debug, Clone)]
pub(crate) struct DrawnUnit {
    pub(crate) step: Option<usize>,
    pub(crate) len: usize,
    pub(crate) record_lens: Vec<usize>,
    pub(crate) is_damaged: bool,
    /// Whether the index says how long the only record is: wrongly, not at all, or rightly.
    pub(crate) predicts: Option<bool>,
}

/// A file as it is drawn.
#[expect(clippy::struct_excessive_bools, reason = "none says anything of another one")]
#[derive(Debug, Clone)]
pub(crate) struct DrawnFile {
    pub(crate) units: Vec<DrawnUnit>,
    /// Whether units hold several records, each only once.
    pub(crate) has_groups: bool,
    /// Whether it is a real file of records, one in each chunk that is not compressed.
    pub(crate) is_array: bool,
    pub(crate) place: Place,
    pub(crate) fault: Fault,
    pub(crate) has_requests: bool,
    pub(crate) is_replaced: bool,
    /// Whether its index has to be read again now and then.
    pub(crate) loses_index: bool,
    /// Records left out at its start, and at its end if it is opened when it is read.
    pub(crate) skip: usize,
    pub(crate) leave: Option<usize>,
}

/// A unit of a file.
#[derive(Debug)]
struct Unit {
    begin: usize,
    end: usize,
    record_lens: Vec<usize>,
    is_damaged: bool,
    predicted_len: u32,
}

/// A file, and what is to be found in it.
#[derive(Debug)]
pub(crate) struct TestFile {
    pub(crate) drawn: DrawnFile,
    pub(crate) path: PathBuf,
    pub(crate) bytes: Vec<u8>,
    /// The bytes up to here hold records, those behind it the index.
    pub(crate) data_len: usize,
    units: Vec<Unit>,
    /// The unit of each record, and its number there.
    places: Vec<(usize, usize)>,
    /// Each record that is used, or the text of its error.
    pub(crate) records: Vec<Result<Vec<u8>, String>>,
    /// How many are used, if that is said when the file is not open yet.
    take: Option<u64>,
    /// Whether no unit has bytes of another one, so that decoding may change them.
    is_disjoint: bool,
    num_located: AtomicUsize,
    pub(crate) num_reads: AtomicUsize,
    pub(crate) num_requests: AtomicUsize,
}

/// The records of a unit, which depend on all of its bytes and its extent.
fn decoded(
    raw: &[u8],
    pick: (u64, u64),
    lens: &[usize],
    values: &mut Vec<u8>,
    ends: &mut Vec<usize>,
) {
    let key = highway::hash(raw) ^ pick.0.rotate_left(20) ^ pick.1.rotate_left(40);
    values.clear();
    ends.clear();
    for (within, &len) in lens.iter().enumerate() {
        let end = values.len() + len;
        values.extend((key ^ within as u64).to_le_bytes().repeat(len / 8 + 1));
        values.truncate(end);
        ends.push(end);
    }
}

impl Unit {
    fn extent(&self) -> (u64, u64) {
        (self.begin as u64, self.end as u64)
    }
}

impl TestFile {
    pub(crate) fn new(drawn: &DrawnFile, number: usize) -> Self {
        let units = units_of(drawn);
        let place_of = |(number, unit): (usize, &Unit)| {
            (0..unit.record_lens.len()).map(move |within| (number, within)).collect::<Vec<_>>()
        };
        let places: Vec<_> = units.iter().enumerate().flat_map(place_of).collect();
        let mut drawn = drawn.clone();
        drawn.skip = drawn.skip.min(places.len());
        drawn.is_replaced &= !drawn.has_requests; // what has requests is opened without waiting
        let leave = drawn.leave.filter(|_| !drawn.is_array);
        let take = leave.map(|leave| (places.len() - drawn.skip).saturating_sub(leave) as u64);
        let is_opened_first = matches!(drawn.fault, Fault::Missing) && take.is_none();
        if drawn.is_array || is_opened_first {
            drawn.fault = Fault::Nothing;
        }
        let name = if drawn.is_array { "array" } else { "file" };
        let mut file = Self {
            path: PathBuf::from(format!("{name}{number}")),
            bytes: Vec::new(),
            data_len: units.iter().map(|unit| unit.end).max().unwrap_or(0),
            is_disjoint: units.windows(2).all(|two| two[0].end <= two[1].begin),
            units,
            places,
            records: Vec::new(),
            take,
            num_located: AtomicUsize::new(0),
            num_reads: AtomicUsize::new(0),
            num_requests: AtomicUsize::new(0),
            drawn,
        };
        if file.drawn.is_array {
            file.write_array(number as u64);
        } else {
            file.fill(number as u64);
        }
        file
    }

    /// Makes up the bytes, and derives the records from them.
    fn fill(&mut self, seed: u64) {
        let mut random = Random::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        self.bytes = random.bytes(self.data_len + 8);
        let (mut values, mut ends) = (Vec::new(), Vec::new());
        for unit in &self.units {
            let raw = &self.bytes[unit.begin..unit.end];
            decoded(raw, unit.extent(), &unit.record_lens, &mut values, &mut ends);
            let records = ChunkRecords::new(&values, &ends);
            for within in 0..unit.record_lens.len() {
                let is_read = unit.begin < unit.end;
                self.records.push(match self.drawn.fault {
                    Fault::Missing => Err(self.missing().to_string()),
                    Fault::Changed => Err(self.changed().to_string()),
                    Fault::Always if is_read => Err(self.unreadable().to_string()),
                    _ if unit.is_damaged => Err(self.damage(unit.extent()).to_string()),
                    _ => Ok(records.get(within).unwrap().to_vec()),
                });
            }
        }
        self.keep_used();
    }

    /// Writes a real file, damages it, and reads each record by itself.
    fn write_array(&mut self, seed: u64) {
        let mut random = Random::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("written");
        let options =
            if self.drawn.has_groups { "group_size:3,zstd" } else { "group_size:1,uncompressed" };
        let mut writer = RecordWriter::create(&path, options.parse().unwrap()).unwrap();
        let lens = self.units.iter().flat_map(|unit| unit.record_lens.iter().copied());
        lens.for_each(|len| writer.write(&random.bytes(len)).unwrap());
        writer.close().unwrap();
        let intact = Files::open(ArrayRecord, [SourceFile::from(path.clone())]).unwrap();
        self.bytes = std::fs::read(&path).unwrap();
        self.data_len = 0;
        for (record, &(unit, _)) in (0..).zip(&self.places) {
            let extent = intact.plan(&[record]).unwrap().picks()[0].extent();
            let [begin, end] = [extent.start, extent.end].map(|at| usize::try_from(at).unwrap());
            self.data_len = self.data_len.max(end);
            if self.units[unit].is_damaged {
                // Half of it in the header, which is found before the record is verified.
                let len = [end - begin, CHUNK_HEADER_LEN][random.below(2)];
                self.bytes[begin + random.below(len)] ^= 1;
            }
        }
        let damaged = dir.path().join(&self.path);
        std::fs::write(&damaged, &self.bytes).unwrap();
        let alone = Files::open(ArrayRecord, [SourceFile::from(damaged.clone())]).unwrap();
        let (shown, path) = (damaged.display().to_string(), self.path.display().to_string());
        for record in 0..self.places.len() as u64 {
            let read = alone.read(&[record]).map(|found| found.iter().next().unwrap().to_vec());
            self.records.push(read.map_err(|error| error.to_string().replace(&shown, &path)));
        }
        self.keep_used();
    }

    fn keep_used(&mut self) {
        self.records.drain(..self.drawn.skip);
        if let Some(take) = self.take {
            self.records.truncate(usize::try_from(take).unwrap());
        }
    }

    /// How long each of `records` is, also those that cannot be read.
    pub(crate) fn record_lens(&self) -> impl Iterator<Item = usize> {
        let used = self.places[self.drawn.skip..].iter().take(self.records.len());
        used.map(|&(unit, within)| self.units[unit].record_lens[within])
    }

    pub(crate) fn source(&self) -> SourceFile {
        SourceFile {
            skip: self.drawn.skip as u64,
            take: self.take,
            ..SourceFile::from(self.path.clone())
        }
    }

    fn damage(&self, (begin, end): (u64, u64)) -> Error {
        Error::corrupt(&self.path, format!("unit {begin}..{end}"), "damaged by the test")
    }
}

/// Units that follow the rules of formats: a unit with several records is known by its begin, and what
/// has the same extent holds the same.
fn units_of(drawn: &DrawnFile) -> Vec<Unit> {
    let (mut begin, mut units) = (0, Vec::<Unit>::new());
    for unit in &drawn.units {
        let max_records = if drawn.has_groups { usize::MAX } else { 1 };
        let record_lens: Vec<_> = unit.record_lens.iter().copied().take(max_records).collect();
        let last = units.last().map_or((0, 0), |last| (last.begin, last.end));
        begin = unit.step.map_or(last.1.max(begin), |step| begin + step);
        begin += usize::from(drawn.has_groups && !units.is_empty() && begin == last.0);
        let end = begin + unit.len;
        let predicted_len = match (&record_lens[..], unit.predicts) {
            (&[len], Some(is_right)) if !drawn.has_groups => len + usize::from(!is_right) * 77,
            _ => 0,
        };
        let is_damaged = unit.is_damaged && unit.len > 0;
        let predicted_len = u32::try_from(predicted_len).unwrap();
        let same = units.iter().find(|other| (other.begin, other.end) == (begin, end));
        units.push(match same {
            Some(same) => Unit { begin, end, record_lens: same.record_lens.clone(), ..*same },
            None => Unit { begin, end, record_lens, is_damaged, predicted_len },
        });
    }
    units
}

/// Opens the files of a storage, of the test's format or a real one.
#[derive(Debug)]
pub(crate) struct TestFormat(HashMap<PathBuf, Arc<TestFile>>);

impl Format for TestFormat {
    fn open(&self, opened: OpenedFile<'_>) -> Result<Arc<dyn RecordFile>> {
        let file = Arc::clone(&self.0[opened.stored.path()]);
        if file.drawn.is_array {
            return ArrayRecord.open(opened);
        }
        Ok(Arc::new(OpenTestFile { stored: opened.stored, file }))
    }
}

/// All files of a storage as one set.
pub(crate) fn set_of(files: &[Arc<TestFile>], stored: &Arc<Stored>) -> FileSet {
    let storage: Arc<dyn grainmill_core::io::storage::Storage> =
        Arc::new(TestStorage(Arc::clone(stored)));
    let format: Arc<dyn Format> = Arc::new(TestFormat(stored.files.clone()));
    FileSet::in_storage(&storage, &format, files.iter().map(|file| file.source()))
}

#[derive(Debug)]
struct OpenTestFile {
    stored: Box<dyn StoredFile>,
    file: Arc<TestFile>,
}

#[derive(Debug, Default)]
struct Scratch {
    values: Vec<u8>,
    ends: Vec<usize>,
}

impl FormatScratch for Scratch {
    fn trim(&mut self) {}
}

impl RecordFile for OpenTestFile {
    fn stored(&self) -> &dyn StoredFile {
        &*self.stored
    }

    fn num_records(&self) -> u64 {
        self.file.places.len() as u64
    }

    fn stored_len(&self) -> u64 {
        self.file.data_len as u64
    }

    fn has_groups(&self) -> bool {
        self.file.drawn.has_groups
    }

    fn locate(&self, picks: &mut [Pick], latency: Option<&StorageLatency>) -> Result<bool> {
        let file = &self.file;
        let is_lost = file.drawn.loses_index
            && !matches!(file.drawn.fault, Fault::Changed)
            && file.num_located.fetch_add(1, Ordering::Relaxed).is_multiple_of(2);
        match latency {
            None if is_lost => return Ok(false),
            Some(latency) if is_lost => {
                let bytes = self.stored.reopen(false)?.bytes;
                Reader::new(&*bytes, latency).read_at(&mut [0; 8], file.data_len as u64)?;
            }
            _ => {}
        }
        for pick in picks {
            let (number, within) = file.places[usize::try_from(pick.record).unwrap()];
            let unit = &file.units[number];
            (pick.begin, pick.end) = unit.extent();
            pick.within = within as u64;
            pick.predicted_len = unit.predicted_len;
        }
        Ok(true)
    }

    fn is_same(&self, reader: Reader<'_>) -> Result<bool> {
        reader.read_at(&mut [0; 8], self.file.data_len as u64)?;
        Ok(!matches!(self.file.drawn.fault, Fault::Changed))
    }

    fn decode<'a>(
        &self,
        pick: &Pick,
        raw: &'a mut [u8],
        scratch: &'a mut DecodeScratch,
    ) -> Result<ChunkRecords<'a>> {
        let (number, _) = self.file.places[usize::try_from(pick.record).unwrap()];
        let unit = &self.file.units[number];
        assert_eq!(raw.len() as u64, pick.end - pick.begin, "the bytes of another unit");
        if unit.is_damaged {
            return Err(self.file.damage((pick.begin, pick.end)));
        }
        let Scratch { values, ends } = scratch.of();
        decoded(raw, (pick.begin, pick.end), &unit.record_lens, values, ends);
        if self.file.is_disjoint {
            raw.fill(0);
        }
        Ok(ChunkRecords::new(values, ends))
    }

    fn damaged(&self, pick: &Pick, _: &FormatError) -> Error {
        self.file.damage((pick.begin, pick.end))
    }
}
