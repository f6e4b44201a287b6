// SPDX-License-Identifier: Apache-2.0
#include "backends/mooncake/process.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdlib.h>

#include <array>
#include <chrono>
#include <memory>
#include <string>

#include "backends/mooncake/client.h"

namespace kv_offload::mooncake {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;
using ::testing::HasSubstr;

Deadline soon() { return steady_clock::now() + seconds(60); }

struct Begun {
  Descriptor ours;
  std::unique_ptr<Process> process;
};
Begun begin(const std::string& script) {
  Begun begun;
  Descriptor theirs;
  EXPECT_TRUE(make_pair(&begun.ours, &theirs));
  EXPECT_TRUE(launch_of({"sh", "-c", script})(std::move(theirs), &begun.process));
  return begun;
}

TEST(MooncakeProcess, the_exit_status_or_signal_is_reported) {
  const Begun exits = begin("exit 3");
  exits.process->wait_until(soon());
  EXPECT_EQ(exits.process->end_reason(), "it ended with status 3");
  const Begun killed = begin("kill -9 $$");
  killed.process->wait_until(soon());
  EXPECT_EQ(killed.process->end_reason(), "it was ended by signal 9");
}

TEST(MooncakeProcess, the_process_uses_descriptor_3_and_detects_the_engines_end) {
  Begun begun = begin("echo hello >&3; read -r nothing <&3; exit 7");
  std::array<std::byte, 16> buffer{};
  std::size_t got = 0;
  ASSERT_TRUE(receive_message(begun.ours.get(), buffer, soon(), &got));
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(buffer.data()), got), "hello\n");
  EXPECT_EQ(begun.process->end_reason(), "") << "it waits for us";
  begun.ours.reset();
  begun.process->wait_until(soon());
  EXPECT_EQ(begun.process->end_reason(), "it ended with status 7");
}

TEST(MooncakeProcess, the_process_gets_its_settings_but_no_engine_secrets) {
  for (const char* name :
       {"AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "VLLM_API_KEY", "ANY_OTHER", "MC_SET_BY_TEST"}) {
    ::setenv(name, "there", 1);
  }
  const Begun begun = begin(
      "[ -z \"$AWS_SECRET_ACCESS_KEY$HF_TOKEN$VLLM_API_KEY$ANY_OTHER\" ] || exit 1; "
      "[ \"$MC_SET_BY_TEST\" = there ] && [ -n \"$PATH\" ] || exit 2");
  begun.process->wait_until(soon());
  EXPECT_EQ(begun.process->end_reason(), "it ended with status 0");
  for (const char* name :
       {"AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "VLLM_API_KEY", "ANY_OTHER", "MC_SET_BY_TEST"}) {
    ::unsetenv(name);
  }
}

TEST(MooncakeProcess, a_process_that_does_not_end_is_killed) {
  Begun begun =
      begin("trap '' TERM INT HUP; echo on >&3; while :; do read -r line <&3 || exec sleep 10000; done");
  std::array<std::byte, 16> buffer{};
  std::size_t got = 0;
  ASSERT_TRUE(receive_message(begun.ours.get(), buffer, soon(), &got));
  begun.process.reset();
  const Status gone = receive_message(begun.ours.get(), buffer, soon(), &got);
  EXPECT_EQ(gone.kind(), StatusKind::kIo) << "its end of the socket is closed: " << gone.to_string();
}

TEST(MooncakeProcess, a_missing_program_is_named_in_the_error) {
  Descriptor ours, theirs;
  ASSERT_TRUE(make_pair(&ours, &theirs));
  std::unique_ptr<Process> process;
  const Status status = launch_of({"/nowhere/python3"})(std::move(theirs), &process);
  EXPECT_THAT(status.message(), HasSubstr("/nowhere/python3 cannot be run: No such file"));
  EXPECT_EQ(process, nullptr);
}

TEST(MooncakeProcess, a_process_that_sends_nothing_is_retried) {
  // The first ends before the setup is sent, the second after it received the setup.
  for (const char* script : {"exit 6", "dd count=1 <&3 >/dev/null 2>&1; exit 6"}) {
    ClientOptions options;
    options.launch = launch_of({"sh", "-c", script});
    options.setup = "{}";
    options.shortest_pause = options.longest_pause = std::chrono::milliseconds(1);
    Client client(options);
    bool refused = true;
    const Status status = client.wait_for_start(soon(), &refused);
    EXPECT_EQ(status.kind(), StatusKind::kIo) << status.to_string();
    EXPECT_FALSE(refused);
    EXPECT_THAT(status.message(), HasSubstr("did not report its start: it ended with status 6"));
    std::unique_ptr<Channel> channel;
    EXPECT_EQ(client.take(10, &channel).kind(), StatusKind::kIo);
  }
}

TEST(MooncakeClient, invalid_utf8_in_client_messages_is_replaced) {
  const auto read = [](std::string_view said) { return text_of(std::as_bytes(std::span(said))); };
  EXPECT_EQ(read("plain"), "plain");
  EXPECT_EQ(read("\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80"), "\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80");
  EXPECT_EQ(read("cut \xE2\x82"), "cut ??");
  EXPECT_EQ(read("\xFF\xC0\x80\x80z"), "????z");
  EXPECT_EQ(read("\xE0\x80\x80|\xED\xA0\x80|\xF0\x80\x80\x80|\xF4\x90\x80\x80"), "???|???|????|????");
}

}  // namespace
}  // namespace kv_offload::mooncake
