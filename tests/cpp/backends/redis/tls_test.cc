// SPDX-License-Identifier: Apache-2.0
// TLS against a real server: trusted certificates are accepted, and all others are refused.
#include "backends/redis/tls.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "backends/redis/cluster.h"
#include "backends/redis/server.h"
#include "backends/redis/tier.h"
#include "tier/tier_driver.h"

namespace kv_offload {
namespace {

using namespace testing;

class RedisTlsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!redis::has_tls()) GTEST_SKIP() << "built without OpenSSL";
    ASSERT_NE(mkdtemp(directory_.data()), nullptr);
    certificate("server", "-days 1 -addext subjectAltName=IP:127.0.0.1,DNS:localhost");
    certificate("other", "-days 1 -addext subjectAltName=IP:127.0.0.1");
    start("server");
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  void certificate(const std::string& name, const std::string& options) const {
    const std::string command =
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes "
        "-subj /CN=test -keyout " +
        file(name, "key") + " -out " + file(name, "pem") + " " + options + " 2>/dev/null";
    ASSERT_EQ(std::system(command.c_str()), 0) << command;
  }
  // Only `openssl ca` accepts dates.
  void make_expired(const std::string& name) const {
    std::ofstream(directory_ + "/ca.conf") << "[ca]\ndefault_ca=d\n[d]\ndatabase=" << directory_
                                           << "/index\nnew_certs_dir=" << directory_ << "\nrand_serial=yes\n"
                                           << "default_md=sha256\npolicy=p\ncopy_extensions=copy\n"
                                           << "[p]\ncommonName=supplied\n";
    std::ofstream(directory_ + "/index").flush();
    const std::string command =
        "openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=test -keyout " +
        file(name, "key") + " -out " + file(name, "csr") +
        " -addext subjectAltName=IP:127.0.0.1 2>/dev/null && openssl ca -selfsign -batch -notext -startdate "
        "20200101000000Z -enddate 20200102000000Z -config " +
        directory_ + "/ca.conf -in " + file(name, "csr") + " -keyfile " + file(name, "key") + " -out " +
        file(name, "pem") + " 2>/dev/null";
    ASSERT_EQ(std::system(command.c_str()), 0) << command;
  }
  void start(const std::string& name, const std::vector<std::string>& others = {}) {
    server_.reset();
    port_ = unused_port();
    std::vector<std::string> words{"--tls-port",      std::to_string(port_), "--bind",
                                   "127.0.0.1",       "--tls-cert-file",     file(name, "pem"),
                                   "--tls-key-file",  file(name, "key"),     "--tls-ca-cert-file",
                                   file(name, "pem"), "--tls-auth-clients",  "no"};
    words.insert(words.end(), others.begin(), others.end());
    server_ = std::make_unique<RedisProcess>(words);
  }
  std::string file(const std::string& name, const std::string& kind) const {
    return directory_ + "/" + name + "." + kind;
  }
  RedisTierOptions options(const std::string& trusted = "server") const {
    RedisTierOptions options;
    options.server.host = "127.0.0.1";
    options.server.port = port_;
    options.server.tls = true;
    options.server.ca_file = trusted.empty() ? "" : file(trusted, "pem");
    options.op_timeout = std::chrono::seconds(60);
    return options;
  }
  static std::string refused(const RedisTierOptions& options) {
    try {
      (void)make_redis_tier(options);
    } catch (const ResourceError& error) {
      return error.what();
    }
    return {};
  }

  std::string directory_ = "/tmp/kv-tls-XXXXXX";
  std::uint16_t port_ = 0;
  std::unique_ptr<RedisProcess> server_;
};

TEST_F(RedisTlsTest, records_of_any_size_are_read_back) {
  TierDriver user(make_redis_tier(options()));
  for (const ShardSizes& sizes : {ShardSizes{300}, ShardSizes{3 << 20}, ShardSizes{5000, 0, 4096, 1}}) {
    const auto number = static_cast<std::uint32_t>(sizes.front());
    ASSERT_TRUE(user.write(number, sizes));
    EXPECT_TRUE(user.read(number, sizes));
  }
  RedisTierOptions by_name = options();
  by_name.server.host = "localhost";
  TierDriver later(make_redis_tier(by_name));
  EXPECT_TRUE(later.has(300));
  EXPECT_FALSE(later.has(4));
}

TEST_F(RedisTlsTest, an_untrusted_certificate_is_refused) {
  EXPECT_NE(refused(options("other")).find("certificate is not trusted"), std::string::npos);
  EXPECT_NE(refused(options("")).find("certificate is not trusted"), std::string::npos) << "system CAs";
}

TEST_F(RedisTlsTest, a_certificate_with_another_name_is_refused) {
  certificate("named", "-days 1 -addext subjectAltName=DNS:somebody.else");
  start("named");
  EXPECT_NE(refused(options("named")).find("mismatch"), std::string::npos) << refused(options("named"));
}

// A node announces an address and the name in its certificate.
TEST_F(RedisTlsTest, a_cluster_nodes_certificate_matches_its_name_or_else_its_address) {
  certificate("named", "-days 1 -addext subjectAltName=DNS:localhost");
  for (const bool announced : {true, false}) {
    std::vector<std::string> words{"--tls-cluster",         "yes",
                                   "--cluster-enabled",     "yes",
                                   "--cluster-port",        std::to_string(unused_port()),
                                   "--cluster-announce-ip", "127.0.0.1"};
    if (announced) words.insert(words.end(), {"--cluster-announce-hostname", "localhost"});
    start("named", words);
    server_->call({"CLUSTER", "ADDSLOTSRANGE", "0", "16383"});
    RedisTierOptions named = options("named");
    named.server.host = "localhost";  // the certificate has the seed's own name
    redis::Cluster cluster({named.server});
    const redis::Deadline until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    bool refused = false;
    ASSERT_TRUE(cluster.learn(until, &refused));
    redis::Reply reply;
    const Status status = cluster.at("key", OpKind::kRead, until, &reply,
                                     [&](redis::Connection& connection, redis::Reply* answer) {
                                       return connection.call({"CLUSTER", "MYID"}, until, answer);
                                     });
    EXPECT_EQ(status.is_ok(), announced) << status.to_string();
    EXPECT_EQ(status.message().find("mismatch") == std::string::npos, announced) << status.to_string();
  }
}

TEST_F(RedisTlsTest, an_expired_certificate_is_refused) {
  make_expired("old");
  start("old");
  EXPECT_NE(refused(options("old")).find("expired"), std::string::npos) << refused(options("old"));
}

TEST_F(RedisTlsTest, an_invalid_ca_file_is_named_in_the_error) {
  EXPECT_NE(refused(options("nothing")).find("nothing.pem"), std::string::npos);
}

TEST_F(RedisTlsTest, a_server_that_disappears_is_a_failure_and_sends_no_signal) {
  TierDriver user(make_redis_tier(options()));
  ASSERT_TRUE(user.write(1));
  server_->kill();
  EXPECT_FALSE(user.write(2, {4 << 20}));
  EXPECT_FALSE(user.read(1));
  server_->start();
  ASSERT_TRUE(user.write(3));
  EXPECT_TRUE(user.read(3));
}

}  // namespace
}  // namespace kv_offload
