//! Runs each model in many orders of its threads.

use grainmill_models::models;

#[test]
fn every_queued_read_starts_within_the_limit() {
    models::read_queue();
}

#[test]
fn a_limit_that_changes_holds() {
    models::read_queue_limits();
}

#[test]
fn queues_of_a_process_share_its_limit() {
    models::read_queues_of_a_process();
}

#[test]
fn storages_keep_their_limits() {
    models::read_storages();
}

#[test]
fn each_file_of_a_loop_is_opened_once() {
    models::loops_over_files();
}

#[test]
fn work_of_the_pool_runs_at_once() {
    models::thread_pool_at_once();
}

#[test]
fn all_work_of_the_pool_is_done() {
    models::thread_pool();
}

#[test]
fn loops_end_after_their_helpers() {
    models::compute_loops();
}

#[test]
fn a_process_has_one_value() {
    models::per_process();
}

#[test]
fn one_thread_holds_a_key() {
    models::single_flight();
}

#[test]
fn a_chunk_is_read_once() {
    models::chunks();
}

#[test]
fn a_unit_reaches_all_who_wait() {
    models::units();
}
