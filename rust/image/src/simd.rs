//! Functions compiled a second time for processors with wider vectors, selected when called.

/// Defines functions that call another one, which must be `#[inline(always)]`, compiled for the
/// extensions of the processor.
macro_rules! for_processor {
    ($(
        $(#[$meta:meta])*
        fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty = $inner:path;
    )*) => {
        $(
            $(#[$meta])*
            #[cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "compiled for what the processor is asked for first"))]
            fn $name($($argument: $type),*) -> $result {
                #[cfg(target_arch = "x86_64")]
                {
                    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt")]
                    fn with_avx2($($argument: $type),*) -> $result {
                        $inner($($argument),*)
                    }
                    if $crate::simd::has_avx2() {
                        // SAFETY: the processor has the extensions, as `has_avx2` found.
                        return unsafe { with_avx2($($argument),*) };
                    }
                }
                $inner($($argument),*)
            }
        )*
    };
}

pub(crate) use for_processor;

/// Whether the processor has what `for_processor` compiles for.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn has_avx2() -> bool {
    std::arch::is_x86_feature_detected!("avx2")
        && std::arch::is_x86_feature_detected!("bmi1")
        && std::arch::is_x86_feature_detected!("bmi2")
        && std::arch::is_x86_feature_detected!("lzcnt")
}
