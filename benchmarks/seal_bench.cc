// Does a record's sealing cost more than the cipher alone, and what does the digest of a name cost?
// The baseline is OpenSSL's EVP AES-256-GCM over the same bytes, between the same buffers, in the same run,
// round by round; and memcpy with XXH3-64, which a record that is not sealed costs where it is copied.
// Opening is measured in place, as records are opened. Times are CPU seconds of the one thread, for nothing
// here waits: others on the machine change less of them. One JSON object per line.
//
//   seal_bench [ROUNDS] [MEBIBYTES]        default: 15 64 (of each case and round)
#include <fmt/format.h>
#include <openssl/evp.h>
#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/aligned_buffer.h"
#include "bench.h"
#include "storage/record_form.h"
#include "storage/sealed_names.h"

namespace kv_offload {
namespace {

double now() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
}

void require(bool ok) {
  if (!ok) throw std::runtime_error("seal_bench: a step failed");
}

std::shared_ptr<const SealingKeys> some_keys() {
  SealingKeys::Master master;
  master.fill(7);
  return std::make_shared<const SealingKeys>(std::span(&master, 1));
}

// The cipher alone, one message a call.
class Alone {
 public:
  Alone() : context_(EVP_CIPHER_CTX_new()) {}
  ~Alone() { EVP_CIPHER_CTX_free(context_); }
  void run(bool seal, const std::byte* from, std::byte* to, std::size_t bytes) {
    const unsigned char key[32] = {1}, nonce[12] = {};
    unsigned char tag[16] = {}, rest[16];
    int length = 0;
    require(EVP_CipherInit_ex(context_, EVP_aes_256_gcm(), nullptr, key, nonce, seal ? 1 : 0) == 1);
    require(EVP_CipherUpdate(context_, reinterpret_cast<unsigned char*>(to), &length,
                             reinterpret_cast<const unsigned char*>(from), static_cast<int>(bytes)) == 1);
    if (seal) {
      require(EVP_EncryptFinal_ex(context_, rest, &length) == 1);
      require(EVP_CIPHER_CTX_ctrl(context_, EVP_CTRL_GCM_GET_TAG, 16, tag) == 1);
    } else {  // the tag is wrong, and found to be
      require(EVP_CIPHER_CTX_ctrl(context_, EVP_CTRL_GCM_SET_TAG, 16, tag) == 1);
      (void)EVP_DecryptFinal_ex(context_, rest, &length);
    }
  }

 private:
  EVP_CIPHER_CTX* context_;
};

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
  TierOp read = op;
  read.shards = {other.span()};
  Alone alone;
  std::vector<double> seals, opens, evp_seals, evp_opens, copies;
  for (int round = 0; round < rounds; ++round) {
    double seal = 0, open = 0, evp_seal = 0, evp_open = 0, copy = 0;
    for (std::size_t i = 0; i < count; ++i) {
      double began = now();
      {
        OutgoingRecord record(form, space, op);
        require(record.encode().is_ok() && record.finish().is_ok());
      }
      seal += now() - began;
      IncomingRecord record(form, space, read);
      std::memcpy(record.header_page().data(), kept.pieces()[0].data(), kRecordHeaderBytes);
      std::memcpy(other.data(), kept.pieces()[0].data() + kRecordHeaderBytes, bytes);
      began = now();
      require(record.open(kRecordHeaderBytes + bytes).is_ok());
      open += now() - began;
      began = now();
      alone.run(true, row.data(), other.data(), bytes);
      evp_seal += now() - began;
      began = now();
      alone.run(false, other.data(), other.data(), bytes);
      evp_open += now() - began;
      began = now();
      PayloadChecksum sum;
      for (std::size_t at = 0; at < bytes; at += RecordForm::kStepBytes) {
        const std::size_t part = std::min(bytes - at, RecordForm::kStepBytes);
        std::memcpy(other.data() + at, row.data() + at, part);
        sum.add({other.data() + at, part});
      }
      require(sum.value() != 0);
      copy += now() - began;
    }
    for (auto [list, seconds] : {std::pair{&seals, seal},
                                 {&opens, open},
                                 {&evp_seals, evp_seal},
                                 {&evp_opens, evp_open},
                                 {&copies, copy}})
      list->push_back(static_cast<double>(count * bytes) / seconds / 1e9);
  }
  fmt::print(
      "{{\"bench\": \"seal\", \"record_mib\": {}, \"seal_gb_s\": {:.3f}, \"evp_seal_gb_s\": {:.3f}, "
      "\"seal_ratio\": {:.3f}, \"open_gb_s\": {:.3f}, \"evp_open_gb_s\": {:.3f}, \"open_ratio\": {:.3f}, "
      "\"copy_and_sum_gb_s\": {:.3f}}}\n",
      static_cast<double>(bytes) / (1 << 20), bench::median(seals), bench::median(evp_seals),
      bench::median(seals) / bench::median(evp_seals), bench::median(opens), bench::median(evp_opens),
      bench::median(opens) / bench::median(evp_opens), bench::median(copies));
}

// A tier that does nothing: what is measured is the names.
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
  Status reset() override { return Status::ok(); }
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
    const auto named = with_sealed_names(std::make_unique<Nothing>(), some_keys(), NamespaceId{});
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
