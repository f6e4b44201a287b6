// SPDX-License-Identifier: Apache-2.0
#include "record/encryption.h"

#include <gtest/gtest.h>

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <thread>

#include "backends/fs/fixture.h"
#include "tier/encrypted_medium.h"

namespace kv_offload {
namespace {

using testing::keys_of;
using testing::TempDir;

std::string refusal_of(const std::vector<std::string>& paths) {
  try {
    (void)EncryptionKeys::from_files(paths);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "it was accepted";
}

class KeyFileTest : public ::testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& bytes, ::mode_t mode = 0600) {
    const std::string path = dir_.path() + "/" + name;
    std::ofstream(path, std::ios::binary) << bytes;
    EXPECT_EQ(::chmod(path.c_str(), mode), 0);
    return path;
  }
  TempDir dir_;
};

TEST_F(KeyFileTest, each_wrong_file_is_refused_with_a_message_that_says_what_to_change) {
  const std::string bytes(32, 'k');
  for (const ::mode_t mode : {0640u, 0604u, 0610u, 0601u, 0644u}) {
    const std::string refusal = refusal_of({write("mode", bytes, mode)});
    EXPECT_NE(refusal.find("chmod 600"), std::string::npos) << refusal;
  }
  for (const std::size_t size : {0u, 31u, 33u, 64u}) {
    const std::string refusal = refusal_of({write("size", std::string(size, 'k'))});
    EXPECT_NE(refusal.find(fmt::format("has {} bytes: it must have exactly 32", size)), std::string::npos)
        << refusal;
  }
  EXPECT_NE(refusal_of({dir_.path()}).find("not a regular file"), std::string::npos);
  const std::string pipe = dir_.path() + "/pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_NE(refusal_of({pipe}).find("not a regular file"), std::string::npos);
  EXPECT_NE(refusal_of({dir_.path() + "/none"}).find("No such file"), std::string::npos);
  EXPECT_NE(refusal_of({}).find("possible: 1 to 8"), std::string::npos);
  const std::string good = write("good", bytes);
  EXPECT_NE(refusal_of({good, good}).find("the same key twice"), std::string::npos);
  if (::geteuid() == 0) {
    const std::string others = write("others", bytes);
    ASSERT_EQ(::chown(others.c_str(), 12345, 0), 0);
    EXPECT_NE(refusal_of({others}).find("belongs to user 12345"), std::string::npos);
  }
}

// Like the mounted secret of a pod that does not run as root.
TEST_F(KeyFileTest, a_key_file_of_root_may_be_readable_by_its_group) {
  const std::string path = write("key", std::string(32, 'k'), 0440);
  struct ::stat info;
  ASSERT_EQ(::stat(path.c_str(), &info), 0);
  const bool by_root = info.st_uid == 0;
  const std::string own = refusal_of({path});
  EXPECT_EQ(own.find("fsGroup") == std::string::npos, by_root) << own;
  for (const ::mode_t mode : {0640u, 0460u, 0444u, 0450u, 0040u, 04440u}) {
    const std::string refusal = refusal_of({write("mode", std::string(32, 'k'), mode)});
    EXPECT_NE(refusal.find("fsGroup"), std::string::npos) << mode;
  }
  if (!by_root) return;  // only root can give a file to another user
  EXPECT_EQ(own == "it was accepted", has_encryption()) << own;
  ASSERT_EQ(::chown(path.c_str(), 0, 12345), 0);
  EXPECT_NE(refusal_of({path}).find("group 12345"), std::string::npos);
}

TEST_F(KeyFileTest, a_good_file_is_accepted_through_a_link_and_its_bytes_are_never_printed) {
  const std::string path = write("key", "0123456789abcdefghijklmnopqrstuv", 0400);
  const std::string link = dir_.path() + "/link";
  ASSERT_EQ(::symlink(path.c_str(), link.c_str()), 0);
  const auto keys = EncryptionKeys::from_files({link, write("old", std::string(32, 'o'))});
  EXPECT_EQ(keys->size(), 2u);
  EXPECT_EQ(keys->find(keys->id(1)), 1u);
  EXPECT_NE(keys->id(0), keys->id(1));
  EXPECT_EQ(hex_of(keys->id(0)).find("3031"), std::string::npos) << "the id contains the key";
  const std::string refusal = refusal_of({write("long", "0123456789abcdefghijklmnopqrstuvw")});
  EXPECT_EQ(refusal.find("0123456789"), std::string::npos) << refusal;
}

TEST_F(KeyFileTest, tenants_have_keys_of_their_own) {
  const std::string common = write("common", std::string(32, 'c')), own = write("own", std::string(32, 'o')),
                    old = write("old", std::string(32, 'x'));
  const auto keys = EncryptionKeys::from_files({common}, {{}, {own, old}, {}});
  EXPECT_EQ(keys->size(), 3u);
  EXPECT_EQ(keys->id(1), EncryptionKeys::from_files({own})->id(0));
  const auto numbers = {keys->key_of_tenant(0), keys->key_of_tenant(1), keys->key_of_tenant(2),
                        keys->key_of_tenant(9)};
  EXPECT_EQ(std::vector<std::size_t>(numbers), (std::vector<std::size_t>{0, 1, 0, 0}));
  EXPECT_THROW(EncryptionKeys::from_files({common}, {{}, {common}}), InvalidArgument) << "no key of its own";
}

TEST(EncryptionKeysTest, encryption_keys_need_a_build_with_openssl) {
  if (has_encryption()) {
    EXPECT_EQ(keys_of({1})->size(), 1u);
  } else {
    EXPECT_THROW(keys_of({1}), ResourceError);
  }
}

#ifdef KV_OFFLOAD_ENCRYPTION

RecordHeader header_of(const EncryptionKeys& keys, std::size_t bytes) {
  RecordHeader header;
  header.key = ChunkKey("0123456789abcdef");
  header.shard_bytes = {bytes};
  header.payload_bytes = header.stored_bytes = round_up(bytes, kPageBytes);
  header.cipher = Cipher::kAes256Gcm;
  EXPECT_TRUE(begin_encrypt(keys, &header.cipher_fields));
  return header;
}

std::vector<std::byte> encrypted(const EncryptionKeys& keys, RecordHeader* header,
                                 std::vector<std::byte> text) {
  RecordCipher cipher;
  EXPECT_TRUE(cipher.begin(RecordCipher::Direction::kEncrypt, keys, *header));
  EXPECT_TRUE(cipher.step(text.data(), text.data(), text.size()));
  EXPECT_TRUE(cipher.finish_encrypt(&header->cipher_fields));
  return text;
}

Status opened(const EncryptionKeys& keys, const RecordHeader& header, std::vector<std::byte>* text,
              std::size_t step = SIZE_MAX) {
  RecordCipher cipher;
  if (Status status = cipher.begin(RecordCipher::Direction::kDecrypt, keys, header); !status) return status;
  for (std::size_t at = 0; at < text->size();) {
    const std::size_t part = std::min(step, text->size() - at);
    EXPECT_TRUE(cipher.step(text->data() + at, text->data() + at, part));
    at += part;
  }
  return cipher.finish_decrypt(header.cipher_fields);
}

// RFC 4231, test cases 1, 2 and 4: keys of 20, 4 and 25 bytes.
TEST(KeyedHashTest, the_keyed_hash_is_hmac_sha256) {
  const auto hash_of = [](const std::string& key, const std::string& text) {
    const auto bytes = [](const std::string& from) {
      return std::span(reinterpret_cast<const std::uint8_t*>(from.data()), from.size());
    };
    const KeyedHash keyed(bytes(key));
    KeyedHash::Hash hash, again;
    EXPECT_TRUE(keyed.of(bytes(text), &hash));
    EXPECT_TRUE(keyed.of(bytes(text), &again));
    EXPECT_EQ(hash, again) << "the prepared state has changed";
    return hex_of(hash);
  };
  std::string counted;
  for (char c = 1; c <= 25; ++c) counted.push_back(c);
  EXPECT_EQ(hash_of(std::string(20, '\x0b'), "Hi There"),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hash_of("Jefe", "what do ya want for nothing?"),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hash_of(counted, std::string(50, '\xcd')),
            "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
}

TEST(KeyedHashTest, the_keyed_hash_is_equal_on_several_threads) {
  const std::vector<std::uint8_t> key(32, 7);
  const KeyedHash keyed(key);
  KeyedHash::Hash expected;
  ASSERT_TRUE(keyed.of(key, &expected));
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        KeyedHash::Hash hash;
        if (!keyed.of(key, &hash) || hash != expected) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

// Python's hmac and cryptography's AESGCM made the id, the tag and the bytes, from a page that follows the
// table in docs/record-format.md.
TEST(RecordCipherTest, a_record_is_encrypted_as_the_format_specifies) {
  const auto keys = keys_of({1});
  RecordHeader header = header_of(*keys, 4000);
  header.namespace_id.fill(0x11);
  header.group = 3;
  header.element = Element::kBf16;
  header.created_unix_nanos = 1'700'000'000'000'000'000;
  for (std::size_t i = 0; i < header.cipher_fields.salt.size(); ++i)
    header.cipher_fields.salt[i] = static_cast<std::uint8_t>(i);
  std::vector<std::byte> text(4096);
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<std::byte>(i * 7);
  const std::vector<std::byte> secret = encrypted(*keys, &header, text);
  EXPECT_EQ(hex_of(header.cipher_fields.key_id), "2129af037ef3b76d527a1f1c4f38dd2e");
  EXPECT_EQ(hex_of(header.cipher_fields.tag), "f21b91900c5c2f67af527f029dc6f4e3");
  const auto* first = reinterpret_cast<const std::uint8_t*>(secret.data());
  EXPECT_EQ(hex_of({first, 16}), "d1d89f1263b8838a1340aad0a63b7d08");
}

TEST(RecordCipherTest, decryption_works_in_steps_of_any_size) {
  const auto keys = keys_of({1});
  RecordHeader header = header_of(*keys, 8192);
  const std::vector<std::byte> text(8192, std::byte{7});
  const std::vector<std::byte> secret = encrypted(*keys, &header, text);
  EXPECT_NE(secret, text);
  for (const std::size_t step : {std::size_t{1000}, std::size_t{4096}, SIZE_MAX}) {
    std::vector<std::byte> found = secret;
    EXPECT_TRUE(opened(*keys, header, &found, step));
    EXPECT_EQ(found, text);
  }
}

TEST(RecordCipherTest, encrypting_the_same_bytes_twice_gives_different_bytes) {
  const auto keys = keys_of({1});
  const std::vector<std::byte> text(4096);
  RecordHeader one = header_of(*keys, 4096), two = header_of(*keys, 4096);
  EXPECT_NE(one.cipher_fields.salt, two.cipher_fields.salt);
  EXPECT_NE(encrypted(*keys, &one, text), encrypted(*keys, &two, text));
}

TEST(RecordCipherTest, every_change_is_detected) {
  const auto keys = keys_of({1});
  RecordHeader header = header_of(*keys, 4096);
  const std::vector<std::byte> secret = encrypted(*keys, &header, std::vector<std::byte>(4096));
  const std::vector<std::function<void(RecordHeader*)>> changes = {
      [](RecordHeader* h) { h->namespace_id[0] ^= 1; },
      [](RecordHeader* h) { h->key = ChunkKey("0123456789abcdeg"); },
      [](RecordHeader* h) { h->group ^= 1; },
      [](RecordHeader* h) { h->shard_bytes[0] ^= 1; },
      [](RecordHeader* h) { h->element = Element::kBf16; },
      [](RecordHeader* h) { h->codec = Codec::kSplitZstd; },
      [](RecordHeader* h) { h->created_unix_nanos ^= 1; },
      [](RecordHeader* h) { h->cipher_fields.salt[31] ^= 1; },
      [](RecordHeader* h) { h->cipher_fields.tag[15] ^= 1; },
  };
  for (std::size_t i = 0; i < changes.size(); ++i) {
    RecordHeader other = header;
    changes[i](&other);
    std::vector<std::byte> text = secret;
    EXPECT_EQ(opened(*keys, other, &text).kind(), StatusKind::kCorrupt) << i;
  }
  for (const std::size_t at : {0u, 15u, 2048u, 4095u}) {
    std::vector<std::byte> text = secret;
    text[at] ^= std::byte{0x40};
    EXPECT_EQ(opened(*keys, header, &text).kind(), StatusKind::kCorrupt) << at;
  }
  std::vector<std::byte> shorter(secret.begin(), secret.end() - 1);
  EXPECT_EQ(opened(*keys, header, &shorter).kind(), StatusKind::kCorrupt);
  std::vector<std::byte> text = secret;
  EXPECT_TRUE(opened(*keys, header, &text));
}

TEST(RecordCipherTest, a_key_decrypts_only_what_it_encrypted) {
  const auto old_keys = keys_of({1}), both = keys_of({2, 1}), others = keys_of({3});
  RecordHeader header = header_of(*old_keys, 4096);
  const std::vector<std::byte> secret = encrypted(*old_keys, &header, std::vector<std::byte>(4096));
  std::vector<std::byte> text = secret;
  EXPECT_TRUE(opened(*both, header, &text));
  text = secret;
  EXPECT_EQ(opened(*others, header, &text).kind(), StatusKind::kCorrupt);
  EXPECT_EQ(header_of(*both, 4096).cipher_fields.key_id, both->id(0)) << "the first key encrypts";
  // Also when the record's key id is ours.
  header.cipher_fields.key_id = others->id(0);
  EXPECT_EQ(opened(*others, header, &text).kind(), StatusKind::kCorrupt);
}

TEST(EncryptionKeysTest, names_use_a_separate_key_in_each_namespace) {
  const auto keys = keys_of({1, 2});
  NamespaceId here{}, there{};
  there[31] = 1;
  EXPECT_NE(keys->name_key(0, here), keys->name_key(0, there));
  EXPECT_NE(keys->name_key(0, here), keys->name_key(1, here));
}

#endif

}  // namespace
}  // namespace kv_offload
