// SPDX-License-Identifier: Apache-2.0
// Does the encryption of a record take longer than the cipher alone, and how long does the digest of a name
// take? The baselines, in each round of the same run: OpenSSL's EVP AES-256-GCM over as many bytes; the
// cipher and XXH3-64 of its output, because a record has that checksum with and without a tag; and memcpy
// with XXH3-64, the cost of a copied record without encryption. Each variant processes several records in
// turn, so that its bytes are in the CPU's caches. A ratio is the median of the ratios of the rounds.
// Decryption is measured in place, as in a tier. Times are CPU seconds of the only thread, which other
// programs disturb less. One JSON object per line.
//
//   encryption_bench [ROUNDS] [MEBIBYTES]        default: 15 64 (of each case and round)
#include <fmt/format.h>
#include <openssl/evp.h>
#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/aligned_buffer.h"
#include "bench.h"
#include "record/huge_buffer.h"
#include "record/record_form.h"
#include "tier/encrypted_key_tier.h"

namespace kv_offload {
namespace {

double now() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
}

void require(bool ok) {
  if (!ok) throw std::runtime_error("encryption_bench: a step failed");
}

std::shared_ptr<const EncryptionKeys> some_keys() {
  EncryptionKeys::Master master;
  master.fill(7);
  return std::make_shared<const EncryptionKeys>(std::span(&master, 1));
}

// In steps, each of which is checksummed while it is in the nearest cache. `move(at, part)` writes it to `to`
// + at.
template <typename Move>
void move_and_sum(std::byte* to, std::size_t bytes, Move move) {
  PayloadChecksum sum;
  for (std::size_t at = 0; at < bytes; at += RecordForm::kStepBytes) {
    const std::size_t part = std::min(bytes - at, RecordForm::kStepBytes);
    move(at, part);
    sum.add({to + at, part});
  }
  require(sum.value() != 0);
}

// The cipher alone, one message per call.
class Alone {
 public:
  Alone() : context_(EVP_CIPHER_CTX_new()) {
    require(EVP_CipherInit_ex(context_, EVP_aes_256_gcm(), nullptr, nullptr, nullptr, 1) == 1);
  }
  ~Alone() { EVP_CIPHER_CTX_free(context_); }
  void run(bool encrypt, const std::byte* from, std::byte* to, std::size_t bytes) {
    begin(encrypt);
    step(from, to, bytes);
    finish(encrypt);
  }
  void encrypt_and_sum(const std::byte* from, std::byte* to, std::size_t bytes) {
    begin(true);
    move_and_sum(to, bytes, [&](std::size_t at, std::size_t part) { step(from + at, to + at, part); });
    finish(true);
  }

 private:
  void begin(bool encrypt) {
    const unsigned char key[32] = {1}, nonce[12] = {};
    require(EVP_CipherInit_ex(context_, nullptr, nullptr, key, nonce, encrypt ? 1 : 0) == 1);
  }
  void step(const std::byte* from, std::byte* to, std::size_t bytes) {
    int length = 0;
    require(EVP_CipherUpdate(context_, reinterpret_cast<unsigned char*>(to), &length,
                             reinterpret_cast<const unsigned char*>(from), static_cast<int>(bytes)) == 1);
  }
  void finish(bool encrypt) {
    unsigned char tag[16] = {}, rest[16];
    int length = 0;
    if (encrypt) {
      require(EVP_EncryptFinal_ex(context_, rest, &length) == 1);
      require(EVP_CIPHER_CTX_ctrl(context_, EVP_CTRL_GCM_GET_TAG, 16, tag) == 1);
    } else {  // the tag is wrong, which must be detected
      require(EVP_CIPHER_CTX_ctrl(context_, EVP_CTRL_GCM_SET_TAG, 16, tag) == 1);
      (void)EVP_DecryptFinal_ex(context_, rest, &length);
    }
  }

  EVP_CIPHER_CTX* context_;
};

// One variant of moving a record, and its preparation, which is not measured.
struct Way {
  std::function<void()> move;
  std::function<void()> prepare = [] {};
  std::vector<double> seconds = {};  // of each round

  void run(std::size_t count) {
    double sum = 0;
    for (std::size_t i = 0; i < count; ++i) {
      prepare();
      const double began = now();
      move();
      sum += now() - began;
    }
    seconds.push_back(sum);
  }
};

double ratio(const Way& baseline, const Way& ours) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < ours.seconds.size(); ++i)
    ratios.push_back(baseline.seconds[i] / ours.seconds[i]);
  return bench::median(ratios);
}

void copy_and_sum(std::span<const std::byte> from, std::byte* to) {
  move_and_sum(to, from.size(),
               [&](std::size_t at, std::size_t part) { std::memcpy(to + at, from.data() + at, part); });
}

void measure_records(std::size_t bytes, int rounds, std::size_t total) {
  const std::size_t count = std::max<std::size_t>(1, total / bytes);
  RecordForm form({.keys = some_keys()});
  const AlignedBuffer row(bytes), other(bytes);
  for (std::size_t at = 0; at < bytes; ++at) row.data()[at] = static_cast<std::byte>(at * 131 >> 5);
  TierOp op;
  op.key = bench::key_of(1);
  op.shards = {row.span()};
  const NamespaceId space{};
  OutgoingRecord kept(form, space, op);
  require(kept.encode().is_ok() && kept.finish().is_ok());
  const std::byte* const record = kept.pieces()[0].data();
  const HugeBuffer huge(bytes);  // like the buffer that a record is encrypted into
  require(huge.data() != nullptr);
  TierOp read = op;
  read.shards = {other.span()};
  Alone alone;
  const auto put_encrypted_bytes = [&] { std::memcpy(other.data(), record + kRecordHeaderBytes, bytes); };
  const auto encrypt_record = [&] {
    OutgoingRecord outgoing(form, space, op);
    require(outgoing.encode().is_ok() && outgoing.finish().is_ok());
  };
  const auto open_record = [&] {
    IncomingRecord incoming(form, space, read);
    std::memcpy(incoming.header_page().data(), record, kRecordHeaderBytes);
    require(incoming.open(kRecordHeaderBytes + bytes).is_ok());
  };
  Way encrypt{encrypt_record}, open{open_record, put_encrypted_bytes},
      evp_encrypt{[&] { alone.run(true, row.data(), huge.data(), bytes); }},
      evp_and_sum{[&] { alone.encrypt_and_sum(row.data(), huge.data(), bytes); }},
      evp_open{[&] { alone.run(false, other.data(), other.data(), bytes); }, put_encrypted_bytes},
      copy{[&] { copy_and_sum(row.span(), other.data()); }};
  for (int round = 0; round < rounds; ++round) {
    for (Way* way : {&encrypt, &evp_encrypt, &evp_and_sum, &open, &evp_open, &copy}) way->run(count);
  }
  const auto gb_s = [&](const Way& way) {
    return static_cast<double>(count * bytes) / bench::median(way.seconds) / 1e9;
  };
  fmt::print(
      "{{\"bench\": \"encrypt\", \"record_mib\": {}, \"encrypt_gb_s\": {:.3f}, \"evp_encrypt_gb_s\": {:.3f}, "
      "\"encrypt_ratio\": {:.3f}, \"encrypt_ratio_to_cipher_and_sum\": {:.3f}, \"open_gb_s\": {:.3f}, "
      "\"evp_open_gb_s\": {:.3f}, \"open_ratio\": {:.3f}, "
      "\"copy_and_sum_gb_s\": {:.3f}}}\n",
      static_cast<double>(bytes) / (1 << 20), gb_s(encrypt), gb_s(evp_encrypt), ratio(evp_encrypt, encrypt),
      ratio(evp_and_sum, encrypt), gb_s(open), gb_s(evp_open), ratio(evp_open, open), gb_s(copy));
}

// A tier that does nothing, because only the names are measured.
class Nothing final : public Tier {
 public:
  std::string_view name() const override { return "nothing"; }
  void submit(std::vector<TierOp>) override {}
  bool cancel(OpId) override { return false; }
  void poll(std::vector<Completion>*, std::vector<TierRemoval>*) override {}
  Presence contains(const ChunkKey& key) const override {
    return key.size() > 0 ? Presence::kPresent : Presence::kAbsent;
  }
  void prefetch_presence(std::vector<ChunkKey>, KeyOrder) override {}
  void touch(const ChunkKey&) override {}
  Status reset(std::uint64_t) override { return Status::ok(); }
  TierStats stats() const override { return {}; }
  void close() override {}
  double estimate_read_seconds(std::uint64_t) const override { return 0; }
};

void measure_names(int rounds) {
  constexpr std::size_t kKeys = 4096;
  std::vector<double> bare, first, again, digests;
  const auto keys_used = some_keys();
  const NameDigest digest(*keys_used, 0, NamespaceId{});
  for (int round = 0; round < rounds; ++round) {
    Nothing nothing;
    const Tier& below = nothing;
    const auto named = with_encrypted_keys(std::make_unique<Nothing>(), some_keys(), NamespaceId{});
    std::vector<ChunkKey> keys;
    for (std::size_t i = 0; i < kKeys; ++i)
      keys.push_back(bench::key_of(static_cast<std::uint64_t>(round) * kKeys + i));
    const auto time = [&](const Tier& tier) {
      const double began = now();
      for (const ChunkKey& key : keys) require(tier.contains(key) == Presence::kPresent);
      return (now() - began) * 1e6;
    };
    const double began = now();
    for (const ChunkKey& key : keys) require(digest.of(key).size() == NameDigest::kBytes);
    digests.push_back((now() - began) * 1e9 / kKeys);
    bare.push_back(time(below));
    first.push_back(time(*named));
    again.push_back(time(*named));
  }
  fmt::print(
      "{{\"bench\": \"names\", \"keys\": {}, \"bare_us\": {:.0f}, \"first_us\": {:.0f}, "
      "\"again_us\": {:.0f}, \"digest_ns\": {:.0f}}}\n",
      kKeys, bench::median(bare), bench::median(first), bench::median(again), bench::median(digests));
}

}  // namespace
}  // namespace kv_offload

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 15;
  const auto total = static_cast<std::size_t>(argc > 2 ? std::atoi(argv[2]) : 64) << 20;
  for (const std::size_t kib : {512u, 1024u, 2048u, 4096u, 8192u})
    kv_offload::measure_records(std::size_t{kib} << 10, rounds, total);
  kv_offload::measure_names(rounds);
  return 0;
}
