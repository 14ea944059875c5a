//! Serves ranges of one file over HTTP, for `benches/buckets.py`: the address is printed. A second
//! argument is the number of milliseconds after which it answers.
//!
//! It answers as an object store does, and costs little: the file is in memory, each connection has
//! a thread, and an answer is one call of the system.

use std::io::{BufRead, BufReader, IoSlice, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

fn main() -> std::io::Result<()> {
    let path = std::env::args().nth(1).ok_or(std::io::ErrorKind::InvalidInput)?;
    let latency_ms = std::env::args().nth(2).and_then(|text| text.parse().ok()).unwrap_or(0);
    let latency = Duration::from_millis(latency_ms);
    let data: Arc<Vec<u8>> = Arc::new(std::fs::read(path)?);
    let listener = TcpListener::bind("127.0.0.1:0")?;
    writeln!(std::io::stdout(), "{}", listener.local_addr()?)?;
    for stream in listener.incoming() {
        let (stream, data) = (stream?, Arc::clone(&data));
        std::thread::spawn(move || serve(&stream, &data, latency));
    }
    Ok(())
}

/// Answers requests until the client ends the connection.
fn serve(stream: &TcpStream, data: &[u8], latency: Duration) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut lines = BufReader::new(stream);
    let mut line = String::new();
    loop {
        let (mut range, mut is_head) = (None, None);
        loop {
            line.clear();
            if lines.read_line(&mut line)? == 0 {
                return Ok(());
            }
            is_head = is_head.or(Some(line.starts_with("HEAD")));
            match line.trim_end().split_once(": ") {
                Some((name, value)) if name.eq_ignore_ascii_case("range") => {
                    range = part(value, data.len());
                }
                _ if line == "\r\n" => break,
                _ => {}
            }
        }
        if !latency.is_zero() {
            std::thread::sleep(latency);
        }
        let len = data.len();
        let (status, part) = match range {
            Some(range) => ("206 Partial Content", range),
            None => ("200 OK", 0..len),
        };
        let head = format!(
            "HTTP/1.1 {status}\r\nETag: \"1\"\r\nLast-Modified: Tue, 14 Nov 2023 22:13:20 GMT\r\n\
             Content-Range: bytes {}-{}/{len}\r\nContent-Length: {}\r\n\r\n",
            part.start,
            part.end.saturating_sub(1),
            part.len()
        );
        let body = if is_head == Some(true) { &[] } else { &data[part] };
        let mut rest = &mut [IoSlice::new(head.as_bytes()), IoSlice::new(body)][..];
        let mut writer = stream;
        while !rest.is_empty() {
            let written = writer.write_vectored(rest)?;
            IoSlice::advance_slices(&mut rest, written);
        }
    }
}

/// The part of a file of `len` bytes that the value of a `Range` header names.
fn part(value: &str, len: usize) -> Option<std::ops::Range<usize>> {
    let (first, last) = value.strip_prefix("bytes=")?.split_once('-')?;
    let last = last.parse::<usize>().ok();
    let part = match first.parse::<usize>() {
        Ok(first) => first..last.map_or(len, |last| len.min(last + 1)),
        Err(_) => len.saturating_sub(last?)..len,
    };
    (part.start < part.end).then_some(part)
}
