// SPDX-License-Identifier: Apache-2.0
#include "record/encryption.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <climits>
#include <cstring>
#include <string_view>

#ifdef KV_OFFLOAD_ENCRYPTION
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/rand.h>
#endif

namespace kv_offload {
namespace {

// Clears memory in a way that the compiler cannot optimise away.
void cleanse(void* data, std::size_t bytes) {
#ifdef KV_OFFLOAD_ENCRYPTION
  OPENSSL_cleanse(data, bytes);
#else
  ::explicit_bzero(data, bytes);
#endif
}

// Clears the memory at the end of the scope, also on an exception.
struct Cleansed {
  void* data;
  std::size_t bytes;
  ~Cleansed() { cleanse(data, bytes); }
};

struct OpenFile {
  int fd;
  ~OpenFile() {
    if (fd >= 0) ::close(fd);
  }
};

std::string open_error(int error) { return Status::from_errno(error, "open").message(); }

bool is_own_group(::gid_t group) {
  std::vector<::gid_t> groups(static_cast<std::size_t>(std::max(::getgroups(0, nullptr), 0)) + 1);
  const int count = ::getgroups(static_cast<int>(groups.size()), groups.data());
  const auto end = groups.begin() + std::max(count, 0);
  return group == ::getegid() || std::find(groups.begin(), end, group) != end;
}

// True for a secret as Kubernetes mounts it for a non-root user: its fsGroup may read the file, no user may
// change it.
bool is_shared_by_root(const struct ::stat& info) {
  return info.st_uid == 0 && (info.st_mode & 07777u) == 0440u && is_own_group(info.st_gid);
}

// Follows links, because Kubernetes secrets are links.
void read_master(const std::string& path, EncryptionKeys::Master* master) {
  const OpenFile file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY)};
  if (file.fd < 0) {
    throw_resource("encryption_key_file {}: {}; give a file with 32 random bytes (head -c 32 /dev/urandom)",
                   path, open_error(errno));
  }
  struct ::stat info;
  if (::fstat(file.fd, &info) != 0) throw_resource("encryption_key_file {}: {}", path, open_error(errno));
  // The file must be regular, owned by this user or root, and inaccessible to others.
  if (!S_ISREG(info.st_mode)) {
    throw_resource("encryption_key_file {} is not a regular file: give one with 32 random bytes", path);
  }
  if (info.st_uid != ::geteuid() && info.st_uid != 0) {
    throw_resource(
        "encryption_key_file {} belongs to user {}, this process is user {}: chown it to {} or root", path,
        info.st_uid, ::geteuid(), ::geteuid());
  }
  if ((info.st_mode & (S_IRWXG | S_IRWXO)) != 0 && !is_shared_by_root(info)) {
    throw_resource(
        "encryption_key_file {} has mode {:04o} and group {}, so other users may access it: chmod 600 it, or "
        "make root its owner, with mode 0440 and a group of this process (Kubernetes fsGroup)",
        path, info.st_mode & 07777u, info.st_gid);
  }
  // One byte more than a key, so that a longer file is noticed.
  std::array<std::uint8_t, EncryptionKeys::kMasterBytes + 1> bytes{};
  const Cleansed in_the_end{bytes.data(), bytes.size()};
  ::ssize_t length = 0;
  do {
    length = ::read(file.fd, bytes.data(), bytes.size());
  } while (length < 0 && errno == EINTR);
  if (length < 0) throw_resource("encryption_key_file {}: {}", path, open_error(errno));
  const auto size = static_cast<std::uint64_t>(info.st_size);
  if (size != EncryptionKeys::kMasterBytes || static_cast<std::uint64_t>(length) != size) {
    throw_resource(
        "encryption_key_file {} has {} bytes: it must have exactly {}, random and not written as "
        "text (head -c 32 /dev/urandom)",
        path, size, EncryptionKeys::kMasterBytes);
  }
  std::copy_n(bytes.begin(), master->size(), master->begin());
}

}  // namespace

#ifdef KV_OFFLOAD_ENCRYPTION

namespace {

constexpr int kNonceBytes = 12;
constexpr unsigned char kNonce[kNonceBytes] = {};  // constant: each key encrypts one message

// Fetched once: OpenSSL 3 looks EVP_aes_256_gcm() up again for each record.
const EVP_CIPHER* aes_256_gcm() {
#if OPENSSL_VERSION_NUMBER >= 0x30000000L
  static const EVP_CIPHER* const fetched = EVP_CIPHER_fetch(nullptr, "AES-256-GCM", nullptr);
  if (fetched != nullptr) return fetched;
#endif
  return EVP_aes_256_gcm();
}

// Returns a SHA-256 that has hashed the key, each byte XORed with `pad` (RFC 2104). Null: OpenSSL failed.
EVP_MD_CTX* begun_with(std::span<const std::uint8_t> key, std::uint8_t pad) {
  assert(key.size() <= KeyedHash::kBlockBytes);
  std::array<std::uint8_t, KeyedHash::kBlockBytes> block{};
  const Cleansed in_the_end{block.data(), block.size()};
  std::copy(key.begin(), key.end(), block.begin());
  for (std::uint8_t& byte : block) byte ^= pad;
  EVP_MD_CTX* hash = EVP_MD_CTX_new();
  if (hash != nullptr && EVP_DigestInit_ex(hash, EVP_sha256(), nullptr) == 1 &&
      EVP_DigestUpdate(hash, block.data(), block.size()) == 1)
    return hash;
  EVP_MD_CTX_free(hash);
  return nullptr;
}

// Continues `begun` with these bytes and writes the hash.
bool ended(EVP_MD_CTX* hash, const EVP_MD_CTX* begun, std::span<const std::uint8_t> from,
           KeyedHash::Hash* to) {
  unsigned int length = 0;
  return EVP_MD_CTX_copy_ex(hash, begun) == 1 && EVP_DigestUpdate(hash, from.data(), from.size()) == 1 &&
         EVP_DigestFinal_ex(hash, to->data(), &length) == 1 && length == to->size();
}

// Writes the derived key in place: returning it by value could leave a second copy in memory.
void derive_or_throw(const KeyedHash& key, std::span<const std::uint8_t> from,
                     EncryptionKeys::Derived* derived) {
  if (!key.of(from, derived)) throw_resource("OpenSSL failed to compute HMAC-SHA256");
}

void derive_for(const KeyedHash& key, std::string_view purpose, EncryptionKeys::Derived* derived) {
  derive_or_throw(key, {reinterpret_cast<const std::uint8_t*>(purpose.data()), purpose.size()}, derived);
}

std::unique_ptr<const KeyedHash> key_for(const KeyedHash& key, std::string_view purpose) {
  EncryptionKeys::Derived derived;
  const Cleansed in_the_end{derived.data(), derived.size()};
  derive_for(key, purpose, &derived);
  return std::make_unique<const KeyedHash>(derived);
}

Status failed(std::string_view what) {
  return Status::error(StatusKind::kUnavailable, fmt::format("OpenSSL {}", what));
}

}  // namespace

bool has_encryption() { return true; }

KeyedHash::KeyedHash(std::span<const std::uint8_t> key)
    : inner_(begun_with(key, 0x36)), outer_(begun_with(key, 0x5c)) {
  if (inner_ != nullptr && outer_ != nullptr) return;
  EVP_MD_CTX_free(inner_);
  EVP_MD_CTX_free(outer_);
  throw_resource("SHA-256 is not available in OpenSSL");
}
KeyedHash::~KeyedHash() {
  EVP_MD_CTX_free(inner_);
  EVP_MD_CTX_free(outer_);
}

bool KeyedHash::of(std::span<const std::uint8_t> from, Hash* hash) const {
  EVP_MD_CTX* const work = EVP_MD_CTX_new();
  const bool ok = work != nullptr && ended(work, inner_, from, hash) && ended(work, outer_, *hash, hash);
  EVP_MD_CTX_free(work);
  return ok;
}

EncryptionKeys::EncryptionKeys(std::span<const Master> masters,
                               std::span<const std::vector<Master>> of_tenants) {
  add(masters);
  for (const std::vector<Master>& own : of_tenants) {
    first_of_tenant_.push_back(own.empty() ? 0 : keys_.size());
    if (!own.empty()) add(own);
  }
}

void EncryptionKeys::add(std::span<const Master> masters) {
  if (masters.empty() || masters.size() > kMostKeys)
    throw_invalid("encryption_key_file names {} keys; possible: 1 to {}", masters.size(), kMostKeys);
  for (const Master& bytes : masters) {
    const KeyedHash master(bytes);
    Key key;
    Derived id;
    derive_for(master, "kv_offload: id of a key", &id);
    std::copy_n(id.begin(), key.id.size(), key.id.begin());
    key.encrypts = key_for(master, "kv_offload: seals records");
    key.names = key_for(master, "kv_offload: names records");
    if (find(key.id)) throw_invalid("encryption_key_file names the same key twice (id {})", hex_of(key.id));
    keys_.push_back(std::move(key));
  }
}

EncryptionKeys::Derived EncryptionKeys::name_key(std::size_t which, const NamespaceId& namespace_id) const {
  Derived derived;
  derive_or_throw(*keys_[which].names, namespace_id, &derived);
  return derived;
}

Status begin_encrypt(const EncryptionKeys& keys, CipherFields* cipher_fields, std::size_t which) {
  cipher_fields->key_id = keys.id(which);
  if (RAND_bytes(cipher_fields->salt.data(), static_cast<int>(cipher_fields->salt.size())) == 1)
    return Status::ok();
  return failed("returned no random bytes");
}

RecordCipher::RecordCipher() : context_(EVP_CIPHER_CTX_new()) {
  if (context_ == nullptr) throw std::bad_alloc();
}
RecordCipher::~RecordCipher() { EVP_CIPHER_CTX_free(context_); }

Status RecordCipher::begin(Direction direction, const EncryptionKeys& keys, const RecordHeader& header) {
  const std::optional<std::size_t> which = keys.find(header.cipher_fields.key_id);
  if (!which) {
    return Status::error(StatusKind::kCorrupt,
                         fmt::format("encrypted with the key {}, which is not configured here",
                                     hex_of(header.cipher_fields.key_id)));
  }
  if (header.padded_stored_bytes() > kMostBytes) return failed("cannot encrypt a record of more than 64 GiB");
  EncryptionKeys::Derived key;
  const Cleansed in_the_end{key.data(), key.size()};
  if (!keys.keys_[*which].encrypts->of(header.cipher_fields.salt, &key))
    return failed("failed to compute HMAC-SHA256");
  const int ok = direction == Direction::kEncrypt
                     ? EVP_EncryptInit_ex(context_, aes_256_gcm(), nullptr, key.data(), kNonce)
                     : EVP_DecryptInit_ex(context_, aes_256_gcm(), nullptr, key.data(), kNonce);
  if (ok != 1) return failed("failed to start AES-256-GCM");
  std::array<std::byte, kRecordHeaderBytes> fields;
  encode_authenticated_fields(header, fields);
  int length = 0;
  if (EVP_CipherUpdate(context_, nullptr, &length, reinterpret_cast<const unsigned char*>(fields.data()),
                       static_cast<int>(fields.size())) != 1)
    return failed("failed to authenticate a record's header");
  return Status::ok();
}

Status RecordCipher::step(const std::byte* from, std::byte* to, std::size_t bytes) {
  constexpr std::size_t kMost = std::size_t{1} << 30;
  while (bytes > 0) {
    const std::size_t part = std::min(bytes, kMost);
    int length = 0;
    if (EVP_CipherUpdate(context_, reinterpret_cast<unsigned char*>(to), &length,
                         reinterpret_cast<const unsigned char*>(from), static_cast<int>(part)) != 1 ||
        length != static_cast<int>(part))
      return failed("failed in the middle of a record");
    from += part;
    to += part;
    bytes -= part;
  }
  return Status::ok();
}

Status RecordCipher::finish_encrypt(CipherFields* cipher_fields) {
  int length = 0;
  unsigned char rest[16];
  if (EVP_EncryptFinal_ex(context_, rest, &length) != 1 ||
      EVP_CIPHER_CTX_ctrl(context_, EVP_CTRL_GCM_GET_TAG, static_cast<int>(cipher_fields->tag.size()),
                          cipher_fields->tag.data()) != 1)
    return failed("failed to finish encrypting a record");
  return Status::ok();
}

Status RecordCipher::finish_decrypt(const CipherFields& cipher_fields) {
  std::array<std::uint8_t, 16> tag = cipher_fields.tag;
  int length = 0;
  unsigned char rest[16];
  if (EVP_CIPHER_CTX_ctrl(context_, EVP_CTRL_GCM_SET_TAG, static_cast<int>(tag.size()), tag.data()) != 1)
    return failed("rejected an authentication tag");
  if (EVP_DecryptFinal_ex(context_, rest, &length) == 1) return Status::ok();
  return Status::error(
      StatusKind::kCorrupt,
      "the authentication tag does not match: the record was altered, or encrypted elsewhere");
}

#else

bool has_encryption() { return false; }
KeyedHash::KeyedHash(std::span<const std::uint8_t>) : inner_(nullptr), outer_(nullptr) {}
KeyedHash::~KeyedHash() = default;
bool KeyedHash::of(std::span<const std::uint8_t>, Hash*) const { return false; }
EncryptionKeys::EncryptionKeys(std::span<const Master>, std::span<const std::vector<Master>>) {
  throw_resource(
      "encryption_key_file needs OpenSSL, and this build has none: build with OpenSSL's headers "
      "(libssl-dev), or remove encryption_key_file");
}
EncryptionKeys::Derived EncryptionKeys::name_key(std::size_t, const NamespaceId&) const { return {}; }
Status begin_encrypt(const EncryptionKeys&, CipherFields*, std::size_t) {
  return Status::error(StatusKind::kUnavailable, "no OpenSSL in this build");
}
RecordCipher::RecordCipher() : context_(nullptr) {}
RecordCipher::~RecordCipher() = default;
Status RecordCipher::begin(Direction, const EncryptionKeys&, const RecordHeader&) {
  return Status::error(StatusKind::kUnavailable, "no OpenSSL in this build");
}
Status RecordCipher::step(const std::byte*, std::byte*, std::size_t) {
  return Status::error(StatusKind::kUnavailable, "no OpenSSL in this build");
}
Status RecordCipher::finish_encrypt(CipherFields*) {
  return Status::error(StatusKind::kUnavailable, "no OpenSSL in this build");
}
Status RecordCipher::finish_decrypt(const CipherFields&) {
  return Status::error(StatusKind::kUnavailable, "no OpenSSL in this build");
}

#endif

EncryptionKeys::~EncryptionKeys() = default;

std::shared_ptr<const EncryptionKeys> EncryptionKeys::from_files(
    const std::vector<std::string>& paths, const std::vector<std::vector<std::string>>& of_tenants) {
  struct AllCleansed {
    std::vector<std::vector<Master>> lists;
    ~AllCleansed() {
      for (std::vector<Master>& list : lists) cleanse(list.data(), list.size() * sizeof(Master));
    }
  } read{std::vector<std::vector<Master>>(1 + of_tenants.size())};
  for (std::size_t list = 0; list < read.lists.size(); ++list) {
    const std::vector<std::string>& files = list == 0 ? paths : of_tenants[list - 1];
    read.lists[list].resize(files.size());
    for (std::size_t i = 0; i < files.size(); ++i) read_master(files[i], &read.lists[list][i]);
  }
  return std::make_shared<const EncryptionKeys>(read.lists[0], std::span(read.lists).subspan(1));
}

std::optional<std::size_t> EncryptionKeys::find(const KeyId& id) const {
  for (std::size_t i = 0; i < keys_.size(); ++i) {
    if (keys_[i].id == id) return i;
  }
  return std::nullopt;
}

}  // namespace kv_offload
