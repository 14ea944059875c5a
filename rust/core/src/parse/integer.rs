//! The types of integers that varints become.

/// A type of integers that varints are written as.
pub(super) trait Integer: Copy {
    /// Bytes of a number.
    const LEN: usize;
    /// Writes `value`; returns whether it fits.
    fn put(value: i64, out: &mut [u8]) -> bool;
}

macro_rules! integers {
    ($($of:ty),*) => {$(
        impl Integer for $of {
            const LEN: usize = size_of::<$of>();
            #[inline]
            fn put(value: i64, out: &mut [u8]) -> bool {
                let bytes = value.to_le_bytes();
                let narrow = <$of>::from_le_bytes(*bytes.first_chunk().expect("it is no longer"));
                out.copy_from_slice(&narrow.to_ne_bytes());
                i64::try_from(narrow) == Ok(value)
            }
        }
    )*};
}
integers!(i8, i16, i32, i64, u8, u16, u32, u64);

impl Integer for bool {
    const LEN: usize = 1;
    #[inline]
    fn put(value: i64, out: &mut [u8]) -> bool {
        out.copy_from_slice(&[u8::from(value != 0)]);
        (0..=1).contains(&value)
    }
}
