//! Names of objects that `object_store` has no paths for, such as `a//b`: one of them would make the
//! whole list an error. So they are replaced in the answer, by names that are replaced back.

/// Begins what stands for a part of a name: its bytes as hexadecimal digits follow.
const MARK: char = '\u{f8ff}';

/// The list `page`, in XML, with all names as they can be parsed.
pub(crate) fn escaped(page: &[u8]) -> Vec<u8> {
    let Ok(text) = std::str::from_utf8(page) else { return page.to_vec() };
    let mut out = String::with_capacity(text.len());
    let mut left = text;
    // `Name` is also that of a bucket, which has no parts.
    while let Some((begin, tag)) =
        ["<Key>", "<Name>"].iter().filter_map(|tag| Some((left.find(tag)? + tag.len(), tag))).min()
    {
        let Some(len) = left[begin..].find(&format!("</{}", &tag[1..])) else { break };
        out += &left[..begin];
        let parts: Vec<_> = left[begin..begin + len].split('/').map(escaped_part).collect();
        out += &parts.join("/");
        left = &left[begin + len..];
    }
    (out + left).into()
}

fn escaped_part(part: &str) -> String {
    let is_odd = matches!(part, "" | "." | "..")
        || part.starts_with(MARK)
        || part.contains(|c: char| c.is_ascii_control());
    if !is_odd {
        return part.to_owned();
    }
    let digits = part.bytes().map(|byte| format!("{byte:02x}"));
    digits.fold(MARK.to_string(), |text, digits| text + &digits)
}

/// The name that stands in the answer for what `name` was parsed from.
pub(crate) fn original(name: &str) -> String {
    let part = |part: &str| match part.strip_prefix(MARK) {
        None => part.to_owned(),
        Some(digits) => {
            let byte = |at| u8::from_str_radix(digits.get(at..at + 2)?, 16).ok();
            let bytes = (0..digits.len()).step_by(2).filter_map(byte).collect();
            String::from_utf8(bytes).unwrap_or_default()
        }
    };
    name.split('/').map(part).collect::<Vec<_>>().join("/")
}

#[cfg(test)]
mod tests {
    use object_store::path::Path;

    use super::*;

    #[test]
    fn every_name_can_be_parsed_and_is_found_again() {
        let names =
            ["a//b", "/a", "a/", "//", "./a", "a/../b", "a/.b", "\u{f8ff}/\u{f8ff}2e", "a\tb"];
        for name in names {
            let page =
                format!("<List><Name>bucket</Name><Key>{name}</Key><Name>{name}</Name></List>");
            let found = String::from_utf8(escaped(page.as_bytes())).unwrap();
            let inner = found.split("<Key>").nth(1).unwrap().split("</Key>").next().unwrap();
            assert!(found.starts_with("<List><Name>bucket</Name>"), "{found}");
            assert!(found.ends_with(&format!("<Name>{inner}</Name></List>")), "{found}");
            assert_eq!(original(Path::parse(inner).unwrap().as_ref()), name);
        }
    }
}
