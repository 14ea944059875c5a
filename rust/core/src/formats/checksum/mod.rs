//! The checksums that formats protect their records with.

pub mod crc32c;
pub mod highway;
#[cfg(target_arch = "x86_64")]
mod highway_lanes;

use crate::write_prefetcher::WritePrefetcher;

/// How many checksums are worth computing together.
pub const MAX_LANES: usize = highway::MAX_LANES;

/// The stored checksum of a record, and what else it covers.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "a few exist at a time, on their way to be verified")]
pub enum Checksum {
    /// The `HighwayHash` of the bytes that the hasher has processed, followed by the record.
    Highway(highway::Hasher, u64),
    /// The masked CRC-32C of the record.
    MaskedCrc32c(u32),
}

/// A record whose checksum has not been verified yet.
#[derive(Debug)]
pub struct UnverifiedRecord<'a> {
    record: &'a mut [u8],
    checksum: Checksum,
}

impl<'a> UnverifiedRecord<'a> {
    /// `record`, which is intact if it has this checksum.
    pub(crate) fn new(record: &'a mut [u8], checksum: Checksum) -> Self {
        Self { record, checksum }
    }

    /// Verifies records; returns the memory of each damaged one and `None` for each intact one.
    /// Verifying a few together takes less time than one by one.
    pub(crate) fn damaged(
        all: Vec<Self>,
        prefetcher: &mut WritePrefetcher,
    ) -> Vec<Option<&'a mut [u8]>> {
        let mut damaged: Vec<Option<&'a mut [u8]>> = Vec::with_capacity(all.len());
        let (mut hashers, mut with_hash) = (Vec::with_capacity(all.len()), Vec::new());
        for Self { record, checksum } in all {
            match checksum {
                Checksum::Highway(hasher, stored) => {
                    hashers.push(hasher);
                    with_hash.push((damaged.len(), record, stored));
                    damaged.push(None);
                }
                Checksum::MaskedCrc32c(stored) => {
                    let is_intact = crc32c::masked(record) == stored;
                    damaged.push((!is_intact).then_some(record));
                }
            }
        }
        let records: Vec<&[u8]> = with_hash.iter().map(|(_, record, _)| &**record).collect();
        let computed = highway::finish_interleaved(hashers, &records, prefetcher);
        for (computed, (at, record, stored)) in computed.into_iter().zip(with_hash) {
            if computed != stored {
                damaged[at] = Some(record);
            }
        }
        damaged
    }
}
