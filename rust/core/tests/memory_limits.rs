//! Crafted files that state huge lengths, read under a memory limit of the process: they are refused
//! before memory is allocated.
#![expect(clippy::unwrap_used, reason = "a test that cannot continue should fail")]

use std::path::Path;
use std::sync::Once;

use grainmill_core::formats::ArrayRecord;
use grainmill_core::formats::array_record::footer::{MAGIC, VERSION};
use grainmill_core::formats::record_limit::max_decoded_len;
use grainmill_core::formats::riegeli::chunk::kind;
use grainmill_core::formats::riegeli::compress::{Codec, Compressor};
use grainmill_core::formats::riegeli::encode::append_with_len;
use grainmill_core::formats::riegeli::sink::ChunkSink;
use grainmill_core::read::{Files, SourceFile};
use grainmill_core::varint::push_varint;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The memory of the tests and their threads, besides that of the process at its start.
const ALLOWANCE: u64 = 900 << 20;

/// Limits the address space, so that allocating the gigabytes that a file states fails.
fn limit_memory() {
    static LIMIT: Once = Once::new();
    LIMIT.call_once(|| {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = statm.split(' ').next().unwrap().parse().unwrap();
        let maximum = getrlimit(Resource::As).maximum;
        let current = Some(pages * rustix::param::page_size() as u64 + ALLOWANCE);
        setrlimit(Resource::As, Rlimit { current, maximum }).unwrap();
    });
}

const GIB: u64 = 1 << 30;
const CODECS: [Codec; 3] = [
    Codec::Snappy,
    Codec::Zstd { level: 3, window_log: 20 },
    Codec::Brotli { level: 5, window_log: None },
];

fn varint(value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    push_varint(&mut bytes, value);
    bytes
}

/// A block that states `stated` decoded bytes, with an invalid stream of `junk_len` bytes.
fn block_stating(stated: u64, junk_len: usize) -> Vec<u8> {
    // Starts like a zstd frame, so that it is not refused for its first bytes.
    [varint(stated), b"\x28\xb5\x2f\xfd".to_vec(), vec![0; junk_len]].concat()
}

fn compressed(codec: Codec, plain: &[u8]) -> Vec<u8> {
    let mut block = Vec::new();
    Compressor::new(codec).unwrap().append(plain, &mut block).unwrap();
    block
}

fn with_len(block: &[u8]) -> Vec<u8> {
    [varint(block.len() as u64), block.to_vec()].concat()
}

/// A file of one chunk, with this footer or a valid one.
struct Crafted {
    kind: u8,
    num_records: u64,
    decoded_len: u64,
    data: Vec<u8>,
    footer: Option<(u64, u64, Vec<u8>)>,
}

impl Crafted {
    fn chunk(kind: u8, decoded_len: u64, data: Vec<u8>) -> Self {
        Self { kind, num_records: 1, decoded_len, data, footer: None }
    }

    fn write(&self, path: &Path) {
        let mut sink = ChunkSink::new(std::fs::File::create(path).unwrap()).unwrap();
        let Self { kind, num_records, decoded_len, data, .. } = self;
        let begin = sink.write_chunk(*kind, *num_records, *decoded_len, &[data]).unwrap();
        let at = if let Some((num_records, decoded_len, data)) = &self.footer {
            sink.write_chunk(kind::SIMPLE, *num_records, *decoded_len, &[data]).unwrap()
        } else {
            let metadata = [&[8][..], &varint(VERSION), &[16, 1, 24], &varint(*num_records)];
            let metadata = [vec![10], with_len(&metadata.concat())].concat();
            let entry = [&[8][..], &varint(begin), &[24], &varint(*num_records)].concat();
            write_plain(&mut sink, &[&metadata, &entry])
        };
        sink.pad_to_block().unwrap();
        let postscript = [&[8][..], &varint(at), &[16], &varint(MAGIC)].concat();
        write_plain(&mut sink, &[&postscript]);
        sink.pad_to_block().unwrap();
        sink.finish().unwrap();
    }

    /// The error of reading the file under the limit.
    fn error_text(&self) -> String {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("crafted.array_record");
        self.write(&path);
        limit_memory();
        let found = open(&path).and_then(|files| files.read(&[0]).map(drop));
        let text = found.unwrap_err().to_string();
        assert!(text.starts_with(&*path.to_string_lossy()), "{text}");
        text
    }
}

/// Writes an uncompressed simple chunk.
fn write_plain(sink: &mut ChunkSink<std::fs::File>, records: &[&[u8]]) -> u64 {
    let lens: Vec<u8> = records.iter().flat_map(|record| varint(record.len() as u64)).collect();
    let data = [&[0][..], &with_len(&lens), &records.concat()].concat();
    let total = records.iter().map(|record| record.len()).sum::<usize>();
    sink.write_chunk(kind::SIMPLE, records.len() as u64, total as u64, &[&data]).unwrap()
}

fn open(path: &Path) -> grainmill_core::Result<Files> {
    Files::open(ArrayRecord, [SourceFile::from(path.to_owned())])
}

const IN_CHUNK: &str = "chunk 0 at byte 64 (record 0): ";

#[test]
fn chunks_that_state_more_than_the_limit_are_refused() {
    let stated = 32 * GIB;
    for codec in CODECS {
        let lens = with_len(&compressed(codec, &varint(stated)));
        let data = [&[codec.code()][..], &lens, &block_stating(stated, 1 << 20)].concat();
        let text = Crafted::chunk(kind::SIMPLE, stated, data).error_text();
        let expected = format!("{IN_CHUNK}states {stated} decoded bytes, expected at most");
        assert!(text.contains(&expected), "{codec:?}: {text}");
        assert!(text.contains("`GRAINMILL_MAX_RECORD_BYTES`"), "{text}");
    }
    for codec in CODECS.map(Codec::code).into_iter().chain([0]) {
        let data = [&[codec][..], &[3, 0, 0, 0]].concat();
        let text = Crafted::chunk(kind::TRANSPOSED, stated, data).error_text();
        assert!(text.contains("decoded bytes, expected at most"), "{codec}: {text}");
    }
}

#[test]
fn blocks_that_state_more_than_the_chunk_needs_are_refused() {
    let stated = 3 * GIB;
    // 1 MiB that states 3 GiB, whatever the codec.
    let block = block_stating(stated, 1 << 20);
    for codec in CODECS {
        let code = [codec.code()];
        let check = |what: &str, kind, parts: &[&[u8]], max_len: u64| {
            let data = [&[&code[..]], parts].concat().concat();
            let text = Crafted::chunk(kind, 5, data).error_text();
            let expected =
                format!("{IN_CHUNK}block states {stated} decoded bytes, expected at most");
            assert!(text.ends_with(&format!("{expected} {max_len}")), "{codec:?} {what}: {text}");
        };
        check("lengths", kind::SIMPLE, &[&with_len(&block)], 10);
        check("values", kind::SIMPLE, &[&with_len(&compressed(codec, &[5])), &block], 5);
        // One bucket of one buffer; a state that ends the record, which is the first.
        let layout = [&[1, 1][..], &varint(block.len() as u64), &[0, 1, 3, 0, 0]].concat();
        let layout = with_len(&compressed(codec, &layout));
        check("bucket", kind::TRANSPOSED, &[&layout, &block], 10);
        let layout = with_len(&compressed(codec, &[0, 0, 1, 3, 0, 0]));
        check("transitions", kind::TRANSPOSED, &[&layout, &block], 96);
        check(
            "layout",
            kind::TRANSPOSED,
            &[&with_len(&block)],
            max_decoded_len(block.len() as u64 + 6) / 32,
        );
    }
}

#[test]
fn footers_do_not_allocate_more_than_a_valid_record_needs() {
    let codec = Codec::Zstd { level: 3, window_log: 20 };
    let long = 40 << 20;
    let mut data = vec![codec.code()];
    let mut compressor = Compressor::new(codec).unwrap();
    append_with_len(&mut compressor, &varint(long), &mut data).unwrap();
    compressor.append(&vec![0; usize::try_from(long).unwrap()], &mut data).unwrap();
    assert!(data.len() < 10_000);
    let crafted =
        |data| Crafted { footer: Some((1, long, data)), ..Crafted::chunk(kind::SIMPLE, 0, vec![]) };
    let text = crafted(data).error_text();
    assert!(
        text.contains("footer at byte ") && text.contains("a record of 41943040 bytes"),
        "{text}"
    );

    // A frame whose window is 2 GiB and whose length is not stated: one raw block of three bytes.
    let frame = b"\x28\xb5\x2f\xfd\x00\xa8\x19\x00\x00abc";
    let block = [varint(3), frame.to_vec()].concat();
    let mut data = vec![codec.code()];
    append_with_len(&mut compressor, &varint(3), &mut data).unwrap();
    let text = Crafted {
        footer: Some((1, 3, [data, block].concat())),
        ..Crafted::chunk(kind::SIMPLE, 0, vec![])
    }
    .error_text();
    assert!(text.contains("too much memory") || text.contains("Frame requires"), "{text}");
}

#[test]
fn brotli_windows_without_memory_are_an_error() {
    // A window of 1 GiB and two uncompressed blocks: for a single one, a smaller window would do.
    let first = b"\x11\x1e\x04\x00\x02";
    let second = b"\x10\x00\x08";
    let stream = [&first[..], b"abc", second, b"def", b"\x03"].concat();
    let codec = Codec::Brotli { level: 5, window_log: None };
    let lens = with_len(&compressed(codec, &[6]));
    let data = [&[codec.code()][..], &lens, &[6], &stream].concat();
    let text = Crafted::chunk(kind::SIMPLE, 6, data).error_text();
    assert!(text.contains("no memory for a brotli window of 107374"), "{text}");
}
