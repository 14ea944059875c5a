//! The profile of a user in the files of the AWS tools, `~/.aws/credentials` and `~/.aws/config`.

use std::collections::BTreeMap;
use std::path::PathBuf;

/// Names in the files and the names of the options that they set.
const KEYS: [&str; 5] =
    ["aws_access_key_id", "aws_secret_access_key", "aws_session_token", "region", "endpoint_url"];

/// What the profile of `AWS_PROFILE`, or else the default one, says, where `get` looks up variables of
/// the environment. Files that cannot be read say nothing.
pub(crate) fn options<'a>(get: impl Fn(&str) -> Option<&'a str>) -> BTreeMap<&'static str, String> {
    let profile = get("AWS_PROFILE").unwrap_or("default");
    let home = get("HOME").or_else(|| get("USERPROFILE")).map(PathBuf::from);
    let path = |variable: &str, name: &str| match get(variable) {
        Some(path) => Some(PathBuf::from(path)),
        None => home.as_ref().map(|home| home.join(".aws").join(name)),
    };
    let read = |path: Option<PathBuf>| path.and_then(|path| std::fs::read_to_string(path).ok());
    let config = read(path("AWS_CONFIG_FILE", "config")).unwrap_or_default();
    let credentials = read(path("AWS_SHARED_CREDENTIALS_FILE", "credentials")).unwrap_or_default();
    let section =
        if profile == "default" { "default".into() } else { format!("profile {profile}") };
    let mut options = section_of(&config, &section);
    options.extend(section_of(&credentials, profile));
    options
}

/// The known keys in one section of a file. Indented lines belong to nested values and are skipped.
fn section_of(text: &str, section: &str) -> BTreeMap<&'static str, String> {
    let (mut found, mut is_in) = (BTreeMap::new(), false);
    for line in text.lines().filter(|line| !line.starts_with([' ', '\t', '#', ';'])) {
        if let Some(name) = line.trim().strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            is_in = name.trim() == section;
        } else if let Some((name, value)) = line.split_once('=').filter(|_| is_in)
            && let Some(&key) = KEYS.iter().find(|&&key| key == name.trim())
        {
            found.insert(key, value.trim().to_owned());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_the_section_are_found() {
        let text = "# note\n[default]\naws_access_key_id = A\n[profile x]\nregion=eu-1\ns3 =\n  region = no\n\
                    output = json\n[ y ]\nregion = other\n";
        let of = |section| section_of(text, section);
        assert_eq!(of("default"), BTreeMap::from([("aws_access_key_id", "A".to_owned())]));
        assert_eq!(of("profile x"), BTreeMap::from([("region", "eu-1".to_owned())]));
        assert_eq!(of("y"), BTreeMap::from([("region", "other".to_owned())]));
        assert_eq!(of("z"), BTreeMap::new());
    }
}
