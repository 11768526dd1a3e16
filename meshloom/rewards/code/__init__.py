"""Rewards for programs: found in a response, run against the row's tests in a sandbox, judged outside of it."""
