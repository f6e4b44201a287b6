// SPDX-License-Identifier: Apache-2.0
// Connections to servers that answer late, too much, without end, or with something else.
#include "backends/redis/connection.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <gtest/gtest.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <chrono>
#include <string>

#include "backends/redis/medium.h"
#include "backends/redis/socket.h"
#include "backends/redis/store.h"

namespace kv_offload::redis {
namespace {

using namespace kv_offload::testing;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using Answers = RedisScript::Answers;

Deadline soon() { return steady_clock::now() + milliseconds(200); }
Deadline later() { return steady_clock::now() + seconds(240); }

std::unique_ptr<Connection> connected(const Server& server) {
  std::unique_ptr<Connection> connection;
  bool refused = false;
  const Status status = Connection::open(server, nullptr, later(), &connection, &refused);
  EXPECT_TRUE(status) << status.to_string();
  return connection;
}

// The reply is still outstanding, so the socket shows nothing: only the connection's own state does.
TEST(RedisConnectionsTest, a_connection_with_an_outstanding_reply_is_not_used_again) {
  RedisMedium medium;
  medium.server.call({"SET", "present", "x"});
  Connections connections(medium.proxy.address());
  std::unique_ptr<Connection> connection;
  bool refused = false;
  ASSERT_TRUE(connections.take(later(), &connection, &refused));
  medium.proxy.faults.block(RedisProxy::Verb::kLocate);
  Reply reply;
  EXPECT_EQ(connection->call({"EXISTS", "present"}, soon(), &reply).kind(), StatusKind::kTimeout);
  EXPECT_FALSE(connection->usable());
  connections.give_back(std::move(connection));
  ASSERT_TRUE(connections.take(later(), &connection, &refused));
  EXPECT_TRUE(connection->usable());
  medium.proxy.faults.release();
  ASSERT_TRUE(connection->call({"EXISTS", "absent"}, later(), &reply));
  EXPECT_EQ(reply.integer, 0) << "not the answer to the previous request";
}

TEST(RedisConnectionsTest, a_connection_that_answered_is_used_again) {
  RedisMedium medium;
  Connections connections(medium.proxy.address());
  std::unique_ptr<Connection> connection;
  bool refused = false;
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(connections.take(later(), &connection, &refused));
    Reply reply;
    ASSERT_TRUE(connection->call({"NONSENSE"}, later(), &reply));
    EXPECT_EQ(reply.kind, Reply::Kind::kError);
    connections.give_back(std::move(connection));
  }
  EXPECT_EQ(medium.proxy.connections(), 1);
}

TEST(RedisConnectionTest, a_lost_connection_sends_nothing_and_accepts_no_reply) {
  const RedisScript server({{"PING", "+PONG\r\n"}, {"EXISTS", ":1\r\n:1\r\n"}});
  const auto connection = connected(server.address());
  Reply reply;
  EXPECT_EQ(connection->call({"EXISTS", "a"}, later(), &reply).kind(), StatusKind::kIo) << "two answers";
  EXPECT_FALSE(connection->usable());
  EXPECT_EQ(connection->call({"PING"}, later(), &reply).kind(), StatusKind::kIo);
}

TEST(RedisConnectionTest, an_endless_reply_is_not_buffered) {
  std::string many = "*16385\r\n";
  for (int i = 0; i < 16385; ++i) many += ":1\r\n";
  for (const std::string& answer :
       {"$900000000\r\n" + std::string(4 << 20, 'x'), "-ERR " + std::string(4 << 20, 'x'),
        std::string("*1000000000\r\n"), many, std::string("*-2\r\n"), std::string(">2\r\n+push\r\n+push\r\n"),
        std::string("HTTP/1.1 400\r\n\r\n")}) {
    const RedisScript server({{"PING", "+PONG\r\n"}, {"INFO", answer}});
    const auto connection = connected(server.address());
    Reply reply;
    EXPECT_EQ(connection->call({"INFO"}, later(), &reply).kind(), StatusKind::kIo) << answer.substr(0, 30);
    EXPECT_FALSE(connection->usable());
  }
}

TEST(RedisConnectionTest, an_endless_sequence_of_replies_is_not_buffered) {
  const RedisScript server(
      {{"PING", "+PONG\r\n"}, {"EXISTS", "$200000\r\n" + std::string(200'000, 'x') + "\r\n"}});
  const auto connection = connected(server.address());
  const Connection::Command exists{"EXISTS", "a"};
  const std::vector<Connection::Command> commands(8, exists);
  std::vector<Reply> replies;
  EXPECT_EQ(connection->call_all(commands, later(), &replies).kind(), StatusKind::kIo);
}

// The script sends the messages as the answer to a command whose reply is not awaited.
TEST(RedisConnectionTest, messages_are_received_whole_and_a_limited_number_at_once) {
  constexpr std::size_t kMessages = 40'000;
  std::string sent;
  for (std::size_t i = 0; i < kMessages; ++i)
    sent += "*2\r\n$7\r\nmessage\r\n$30\r\n" + std::string(30, 'x') + "\r\n";
  ASSERT_GT(sent.size(), std::size_t{2} << 20);
  const RedisScript server({{"PING", "+PONG\r\n"}, {"LISTEN", sent}});
  const auto connection = connected(server.address());
  std::vector<Reply> messages;
  ASSERT_TRUE(connection->receive_pushed(later(), &messages)) << "there are none";
  EXPECT_TRUE(messages.empty());
  ASSERT_TRUE(connection->send_pushed({"LISTEN"}, later()));
  std::size_t received = 0;
  EXPECT_TRUE(holds_soon([&] {
    messages.clear();
    EXPECT_TRUE(connection->receive_pushed(later(), &messages));
    EXPECT_LE(messages.size() * (sent.size() / kMessages), (std::size_t{1} << 20) + 8192);
    for (const Reply& message : messages) EXPECT_EQ(message.elements.at(1).text.size(), 30u);
    received += messages.size();
    return received >= kMessages;
  }));
  EXPECT_EQ(received, kMessages);
  EXPECT_TRUE(connection->usable());
}

TEST(RedisConnectionTest, a_message_that_is_endless_or_malformed_ends_the_connection) {
  for (const std::string& answer :
       {"$900000000\r\n" + std::string(10 << 20, 'x'), std::string("*1000000000\r\n"),
        std::string(">2\r\n+push\r\n+push\r\n"), std::string("HTTP/1.1 400\r\n")}) {
    const RedisScript server({{"PING", "+PONG\r\n"}, {"LISTEN", answer}});
    const auto connection = connected(server.address());
    ASSERT_TRUE(connection->send_pushed({"LISTEN"}, later()));
    Status status;
    EXPECT_TRUE(holds_soon([&] {
      std::vector<Reply> messages;
      status = connection->receive_pushed(later(), &messages);
      return !status;
    })) << answer.substr(0, 30);
    EXPECT_EQ(status.kind(), StatusKind::kIo);
    EXPECT_FALSE(connection->usable());
  }
}

TEST(RedisConnectionTest, a_value_with_an_invalid_length_reaches_no_row) {
  for (const char* answer : {"$99999999999999999999\r\n", "$-2\r\n", "$4x\r\n", "$\r\n", "$4\r\nabcdefgh",
                             "+OK\r\n", "*1\r\n$4\r\nabcd\r\n", "$-1\r\n$4\r\nabcd\r\n", ":4\r\n"}) {
    const RedisScript server({{"PING", "+PONG\r\n"}, {"GET", answer}});
    const auto connection = connected(server.address());
    std::array<std::byte, 4> row{};
    const std::span<std::byte> piece(row);
    Reply reply;
    std::uint64_t length = 0;
    const Status status = connection->get("key", {&piece, 1}, piece.size(), later(), &reply, &length);
    EXPECT_FALSE(status) << answer;
    EXPECT_FALSE(connection->usable()) << answer;
  }
}

TEST(RedisConnectionTest, a_value_of_another_length_has_its_own_reply_kind) {
  for (const char* answer : {"$3\r\nabc\r\n", "$5\r\nabcde\r\n"}) {
    const RedisScript server({{"PING", "+PONG\r\n"}, {"GET", answer}});
    const auto connection = connected(server.address());
    std::array<std::byte, 4> row{};
    const std::span<std::byte> piece(row);
    Reply reply;
    std::uint64_t length = 0;
    ASSERT_TRUE(connection->get("key", {&piece, 1}, piece.size(), later(), &reply, &length)) << answer;
    EXPECT_EQ(reply.kind, Reply::Kind::kWrongLength) << answer;
    EXPECT_EQ(length, answer[1] - '0');
    EXPECT_FALSE(connection->usable()) << answer;
  }
}

TEST(RedisConnectionTest, an_observer_sees_each_byte_once_in_order_and_one_piece_at_a_time) {
  static constexpr std::size_t kLength = 600'000;
  struct Observer final : ReadProgressSink {
    void filled(std::span<std::byte> part, std::uint64_t offset, std::uint64_t announced) noexcept override {
      EXPECT_EQ(offset, seen.size());
      EXPECT_EQ(announced, kLength);
      EXPECT_TRUE(offset >= 4096 || offset + part.size() <= 4096) << offset << " " << part.size();
      seen.append(reinterpret_cast<const char*>(part.data()), part.size());
    }
    std::string seen;
  };
  std::string value;
  for (std::size_t i = 0; i < kLength; ++i) value += static_cast<char>('a' + i % 23);
  const RedisScript server(
      {{"PING", "+PONG\r\n"}, {"GET", "$" + std::to_string(kLength) + "\r\n" + value + "\r\n"}});
  const auto connection = connected(server.address());
  std::vector<std::byte> first(4096), second(kLength);
  const std::array<std::span<std::byte>, 2> pieces{first, second};
  Reply reply;
  std::uint64_t length = 0;
  Observer observer;
  ASSERT_TRUE(connection->get("key", pieces, 4096, later(), &reply, &length, &observer));
  EXPECT_EQ(length, kLength);
  EXPECT_TRUE(observer.seen == value);
}

// Such a server never lets a wait block, so no wait reaches its timeout.
TEST(RedisSocketTest, a_server_that_always_has_a_byte_ready_ends_with_the_deadline) {
  RedisScript server({});
  server.trickle("xxxxx");
  std::unique_ptr<Socket> socket;
  bool refused = false;
  ASSERT_TRUE(Socket::open(server.address(), nullptr, later(), &socket, &refused));
  pollfd watched{socket->descriptor(), POLLIN, 0};
  ASSERT_EQ(poll(&watched, 1, 240'000), 1);
  char byte = 0;
  iovec into{&byte, 1};
  std::size_t moved = 0;
  EXPECT_EQ(socket->read_some({&into, 1}, steady_clock::now(), &moved).kind(), StatusKind::kTimeout);
  EXPECT_EQ(socket->write_some({&into, 1}, steady_clock::now(), &moved).kind(), StatusKind::kTimeout);
}

TEST(RedisSocketTest, child_processes_do_not_inherit_the_socket_and_idle_ones_use_keepalive) {
  const RedisScript here({{"PING", "+PONG\r\n"}}, RedisScript::On::kPort);
  const auto connection = connected(here.address());
  EXPECT_EQ(fcntl(connection->descriptor(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  int on = 0;
  socklen_t length = sizeof on;
  ASSERT_EQ(getsockopt(connection->descriptor(), SOL_SOCKET, SO_KEEPALIVE, &on, &length), 0);
  EXPECT_EQ(on, 1);
}

// The first record of a handshake, one byte per millisecond: 16 s in total.
TEST(RedisSocketTest, a_tls_handshake_that_arrives_byte_by_byte_ends_with_the_deadline) {
  if (!has_tls()) GTEST_SKIP() << "built without OpenSSL";
  RedisScript slow({}, RedisScript::On::kPort);
  slow.trickle(std::string("\x16\x03\x03\x40\x00", 5) + std::string(0x4000, '\x02'));
  Server server = slow.address();
  server.tls = true;
  std::unique_ptr<Connection> connection;
  bool refused = false;
  const Status status = Connection::open(server, make_tls_context(server), soon(), &connection, &refused);
  EXPECT_EQ(status.kind(), StatusKind::kTimeout) << status.to_string();
  EXPECT_FALSE(refused);
}

// A regression test: each of these answers was counted as a success.
TEST(RedisStoreAnswersTest, an_answer_of_the_wrong_type_is_a_failure) {
  for (const Answers& answers :
       {Answers{{"SET", "+QUEUED\r\n"}}, Answers{{"SET", "$-1\r\n"}}, Answers{{"SET", ":1\r\n"}},
        Answers{{"EXISTS", "+OK\r\n"}}, Answers{{"EXISTS", "$-1\r\n"}}}) {
    const RedisScript server(RedisScript::usual(answers));
    RedisTierOptions options;
    options.server = server.address();
    RedisStore store(options);
    ASSERT_NE(store.epoch(), nullptr);
    Row row({8192});
    row.fill(1);
    TierOp op;
    op.kind = OpKind::kWrite;
    op.key = key_of(1);
    op.shards = row.shards();
    std::uint64_t moved = 0;
    EXPECT_EQ(store.write(op, store.epoch(), &moved).kind(), StatusKind::kIo) << answers.begin()->second;
    EXPECT_EQ(moved, 0u);
    std::vector<bool> present(1);
    const Status located = store.locate({&op.key, 1}, KeyOrder::kNone, store.epoch(), &present);
    EXPECT_EQ(located.is_ok(), !answers.contains("EXISTS")) << located.to_string();
  }
}

// The reply is about the connection and not about the password that was sent.
TEST(RedisStoreAnswersTest, a_server_with_too_many_clients_is_waited_for) {
  for (const auto& [answer, waits] :
       {std::pair{"-ERR max number of clients reached\r\n", true}, std::pair{"-LOADING x\r\n", true},
        std::pair{"-WRONGPASS x\r\n", false}, std::pair{"-ERR invalid password\r\n", false}}) {
    const RedisScript server(RedisScript::usual({{"AUTH", answer}}));
    RedisTierOptions options;
    options.server = server.address();
    options.server.password = "secret";
    if (waits) {
      EXPECT_EQ(RedisStore(options).epoch(), nullptr) << answer;
    } else {
      EXPECT_THROW(RedisStore{options}, ResourceError) << answer;
    }
  }
}

TEST(RedisAddress, the_address_text_has_the_location_without_the_user) {
  Server server;
  server.host = "::1";
  server.database = 3;
  server.user = "kv";
  server.password = "secret";
  EXPECT_EQ(address_of(server), fmt::format("redis://[::1]:{}/3", server.port));
  server.tls = true;
  server.host = "cache";
  EXPECT_EQ(address_of(server), fmt::format("rediss://cache:{}/3", server.port));
  server.host.clear();
  server.unix_socket = "/run/valkey";
  EXPECT_EQ(address_of(server), "unix:///run/valkey db 3");
}

TEST(RedisStoreAnswersTest, a_value_that_is_not_an_epoch_name_is_not_overwritten) {
  const RedisScript server(RedisScript::usual({{"GET", ":1\r\n"}}));
  RedisTierOptions options;
  options.server = server.address();
  EXPECT_EQ(RedisStore(options).epoch(), nullptr);
}

}  // namespace
}  // namespace kv_offload::redis
